/* Callers: one thread, epoll, HTTP/1.1 with kept connections. Says START and END when what is measured begins
 * and ends, so that whoever started it can look at CPU times there, and after a line on its standard input one
 * line of JSON.
 *
 *     load PORT BODY_FILE AUTHORIZATION CONNECTIONS RATE RAMP_S WARM_S SECONDS
 *
 * RATE 0: each connection asks again as soon as it has its answer; the first ones are spread over RAMP_S.
 * Otherwise so many requests a second at even distances, whatever becomes of the others, on the connection
 * that has rested longest; their latency counts from the moment they were due.
 *
 * WARM_S go by before the SECONDS that are measured. `serial=00000000` in the body becomes another number in
 * every request, so that no text is the same as one before; `chunks=dddd` in a connection's first request one
 * from 1 to dddd, so that streams do not all end together.
 *
 * A chunk of a stream is known by the moment of its sending in its text (engine.c), whatever is around it.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { EVENTS = 512, HEAD_MAX = 16384, DIGITS = 16, SERIAL_DIGITS = 8, CHUNKS_DIGITS = 4 };
enum state { RESTS, CONNECTS, ASKS, WAITS, READS };
enum part { SIZE, DATA, DATA_END, TRAILER };

struct caller {
    int fd, index, fresh, watches_writing, chunked, closes, status, stamped;
    enum state state;
    enum part part;
    uint64_t asked_ns, chunk_ns, stamp;
    size_t said, head_bytes;
    long long left; /* bytes of the body, or of its chunk; -1: until the connection ends */
    long chunks;
    char head[HEAD_MAX], *request;
};

struct values {
    float *all;
    size_t count, room;
};

static struct caller *callers;
static int many, opened, poller, *resting, rest_first, rest_count;
static double rate;
static struct sockaddr_in gateway;
static char *request;
static size_t request_bytes, serial_at, chunks_at;
static long chunks_max;
static unsigned serial;
static uint64_t from_ns, until_ns;
static struct values latency, first_chunk, gap, delay;
static unsigned long long good, bad, broken, missed, chunks, reads, single_reads;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void note(struct values *values, double value) {
    if (values->count == values->room) {
        values->room = values->room ? 2 * values->room : 65536;
        values->all = realloc(values->all, values->room * sizeof *values->all);
        if (!values->all) abort();
    }
    values->all[values->count++] = (float)value;
}

static int measured(uint64_t at_ns) { return at_ns >= from_ns && at_ns < until_ns; }

/* ---------------------------------------------------------------- asking */

static void watch(struct caller *caller, int operation, int writing) {
    struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.u32 = (unsigned)caller->index};
    if (operation == EPOLL_CTL_ADD || caller->watches_writing != writing) epoll_ctl(poller, operation, caller->fd, &event);
    caller->watches_writing = writing;
}

static void say(struct caller *caller) {
    while (caller->said < request_bytes) {
        ssize_t taken = send(caller->fd, caller->request + caller->said, request_bytes - caller->said, MSG_NOSIGNAL);
        if (taken < 0) {
            watch(caller, EPOLL_CTL_MOD, 1);
            return;
        }
        caller->said += (size_t)taken;
    }
    if (caller->state == ASKS) caller->state = WAITS;
    watch(caller, EPOLL_CTL_MOD, 0);
}

static void write_number(char *at, int digits, unsigned long number) {
    for (int digit = digits; digit-- > 0; number /= 10) at[digit] = (char)('0' + number % 10);
}

static void ask(struct caller *caller, uint64_t due_ns) {
    caller->asked_ns = due_ns;
    caller->said = caller->head_bytes = 0;
    caller->chunked = caller->closes = caller->stamped = 0;
    caller->left = -1;
    caller->chunks = 0;
    caller->part = SIZE;
    caller->request = request; /* shared, unless something in it is this request's own */
    if (serial_at || (chunks_at && caller->fresh)) {
        caller->request = malloc(request_bytes);
        memcpy(caller->request, request, request_bytes);
        if (serial_at) write_number(caller->request + serial_at, SERIAL_DIGITS, ++serial);
        if (chunks_at && caller->fresh)
            write_number(caller->request + chunks_at, CHUNKS_DIGITS, 1 + (unsigned long)(rand() % chunks_max));
    }
    caller->fresh = 0;
    if (caller->fd >= 0) {
        caller->state = ASKS;
        say(caller);
        return;
    }
    int yes = 1;
    caller->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    setsockopt(caller->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    caller->state = CONNECTS;
    connect(caller->fd, (struct sockaddr *)&gateway, sizeof gateway);
    watch(caller, EPOLL_CTL_ADD, 1);
}

static void finish(struct caller *caller, int whole, uint64_t at_ns) {
    if (measured(at_ns)) {
        if (!whole) broken++;
        else if (caller->status != 200) bad++;
        else good++;
        if (whole && caller->status == 200) note(&latency, (double)(at_ns - caller->asked_ns) / 1e3);
    }
    if (caller->request != request) free(caller->request);
    caller->request = NULL;
    if (!whole || caller->closes) {
        close(caller->fd);
        caller->fd = -1;
    }
    caller->state = RESTS;
    if (rate > 0) resting[(rest_first + rest_count++) % many] = caller->index;
    else if (at_ns < until_ns) ask(caller, now_ns());
}

/* ---------------------------------------------------------------- hearing */

static void chunk_arrived(struct caller *caller, uint64_t at_ns) {
    if (measured(at_ns)) {
        chunks++;
        note(&delay, ((double)at_ns - (double)caller->stamp) / 1e3);
        if (caller->chunks) note(&gap, (double)(at_ns - caller->chunk_ns) / 1e3);
        else note(&first_chunk, (double)(at_ns - caller->asked_ns) / 1e3);
    }
    caller->chunks++;
    caller->chunk_ns = at_ns;
}

/* Looks for stamps, `@` 16 digits `@`, which may lie across two reads. Returns how many ended here. */
static int look(struct caller *caller, const char *text, size_t bytes, uint64_t at_ns) {
    int found = 0;
    for (size_t at = 0; at < bytes; at++) {
        if (!caller->stamped) {
            const char *next = memchr(text + at, '@', bytes - at);
            if (!next) break;
            at = (size_t)(next - text);
            caller->stamped = 1;
            caller->stamp = 0;
            continue;
        }
        char letter = text[at];
        int digit = letter >= '0' && letter <= '9' ? letter - '0' : letter >= 'a' && letter <= 'f' ? letter - 'a' + 10 : -1;
        if (digit >= 0 && caller->stamped <= DIGITS) {
            caller->stamp = caller->stamp << 4 | (unsigned)digit;
            caller->stamped++;
        } else {
            if (letter == '@' && caller->stamped == DIGITS + 1) {
                chunk_arrived(caller, at_ns);
                found++;
            }
            caller->stamped = 0;
        }
    }
    return found;
}

/* Takes bytes of a body. Returns whether it has ended. */
static int take(struct caller *caller, const char *text, size_t bytes, uint64_t at_ns, int *found) {
    if (!caller->chunked) {
        *found += look(caller, text, bytes, at_ns);
        if (caller->left >= 0) caller->left -= (long long)bytes;
        return caller->left == 0;
    }
    while (bytes) {
        if (caller->part == DATA) {
            size_t here = (long long)bytes < caller->left ? bytes : (size_t)caller->left;
            *found += look(caller, text, here, at_ns);
            text += here;
            bytes -= here;
            caller->left -= (long long)here;
            if (!caller->left) caller->part = DATA_END;
            continue;
        }
        char letter = *text++;
        bytes--;
        if (caller->part == SIZE && letter != '\n' && letter != '\r') {
            int digit = letter <= '9' ? letter - '0' : (letter | 32) - 'a' + 10;
            caller->left = (caller->left < 0 ? 0 : caller->left << 4) | digit;
        } else if (letter == '\n') {
            if (caller->part == TRAILER) return 1;
            if (caller->part == SIZE) caller->part = caller->left ? DATA : TRAILER;
            else {
                caller->part = SIZE;
                caller->left = -1;
            }
        }
    }
    return 0;
}

/* Returns the bytes of `text` that belonged to the head, or -1 where it cannot be one. */
static ssize_t read_head(struct caller *caller, const char *text, size_t bytes) {
    size_t before = caller->head_bytes, room = HEAD_MAX - 1 - before, here = bytes < room ? bytes : room;
    memcpy(caller->head + before, text, here);
    caller->head_bytes += here;
    caller->head[caller->head_bytes] = 0;
    char *end = strstr(caller->head, "\r\n\r\n");
    if (!end) return caller->head_bytes == HEAD_MAX - 1 ? -1 : (ssize_t)here;
    end[2] = 0;
    caller->status = atoi(caller->head + 9);
    for (char *line = caller->head; (line = strstr(line, "\r\n")); line += 2) {
        if (!strncasecmp(line + 2, "content-length:", 15)) caller->left = atoll(line + 17);
        if (!strncasecmp(line + 2, "transfer-encoding: chunked", 26)) caller->chunked = 1;
        if (!strncasecmp(line + 2, "connection: close", 17)) caller->closes = 1;
    }
    if (caller->status != 100) caller->state = READS;
    caller->head_bytes = 0;
    return end + 4 - caller->head - (ssize_t)before;
}

static void hear(struct caller *caller) {
    static char text[262144];
    for (;;) {
        ssize_t got = recv(caller->fd, text, sizeof text, 0);
        if (got < 0 && errno == EAGAIN) return;
        uint64_t at_ns = now_ns();
        if (caller->state == RESTS) { /* closed while it rested, which is anybody's right */
            close(caller->fd);
            caller->fd = -1;
            return;
        }
        if (got <= 0) {
            finish(caller, got == 0 && caller->state == READS && !caller->chunked && caller->left < 0, at_ns);
            return;
        }
        ssize_t used = 0;
        int found = 0, ended = 0;
        while (caller->state != READS && used < got) {
            ssize_t head = read_head(caller, text + used, (size_t)(got - used));
            if (head < 0) {
                finish(caller, 0, at_ns);
                return;
            }
            used += head;
        }
        if (caller->state == READS && !caller->chunked && caller->left == 0) ended = 1;
        else if (used < got) ended = take(caller, text + used, (size_t)(got - used), at_ns, &found);
        if (measured(at_ns) && found) {
            reads++;
            single_reads += found == 1;
        }
        if (ended) {
            finish(caller, 1, at_ns);
            return;
        }
        if (got < (ssize_t)sizeof text) return;
    }
}

static void happened(struct caller *caller, unsigned events) {
    if (caller->fd < 0) return;
    if (caller->state == CONNECTS) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(caller->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error) {
            usleep(1000);
            finish(caller, 0, now_ns());
            return;
        }
        caller->state = ASKS;
    }
    if (caller->state == ASKS && events & EPOLLOUT) say(caller);
    if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) hear(caller);
}

/* ---------------------------------------------------------------- the run */

static int ascending(const void *left, const void *right) {
    float a = *(const float *)left, b = *(const float *)right;
    return (a > b) - (a < b);
}

static double quantile(const struct values *values, double share) {
    return values->count ? values->all[(size_t)((double)(values->count - 1) * share)] : -1;
}

static void print_values(const char *name, struct values *values) {
    qsort(values->all, values->count, sizeof *values->all, ascending);
    printf(", \"%s_us\": {\"count\": %zu, \"p50\": %.1f, \"p99\": %.1f, \"max\": %.1f}", name, values->count,
           quantile(values, 0.5), quantile(values, 0.99), quantile(values, 1));
}

static int prepare(const char *port, const char *path, const char *authorization) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) return 0;
    size_t bytes = (size_t)ftell(file);
    rewind(file);
    request = malloc(bytes + 1024);
    size_t head = (size_t)sprintf(request,
                                  "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%s\r\nContent-Type: application/json\r\n"
                                  "Accept: */*\r\nAuthorization: %.512s\r\nContent-Length: %zu\r\n\r\n",
                                  port, authorization, bytes);
    if (fread(request + head, 1, bytes, file) != bytes) return 0;
    fclose(file);
    request_bytes = head + bytes;
    char *found = memmem(request, request_bytes, "serial=00000000", 15);
    if (found) serial_at = (size_t)(found + 7 - request);
    found = memmem(request, request_bytes, "chunks=", 7);
    if (found) {
        chunks_at = (size_t)(found + 7 - request);
        chunks_max = atol(found + 7);
    }
    return 1;
}

/* Asks whoever is to ask by now. Returns when the next one is. */
static uint64_t ask_all_due(uint64_t start_ns, double ramp_s, uint64_t now) {
    static unsigned long long arrivals;
    while (rate > 0) {
        uint64_t due = start_ns + (uint64_t)((double)arrivals * 1e9 / rate);
        if (due > now) return due;
        arrivals++;
        if (opened < many) ask(&callers[opened++], due);
        else if (rest_count) {
            struct caller *caller = &callers[resting[rest_first]];
            rest_first = (rest_first + 1) % many;
            rest_count--;
            ask(caller, due);
        } else if (measured(now)) missed++;
    }
    while (opened < many) {
        uint64_t due = start_ns + (uint64_t)(ramp_s * 1e9 * opened / many);
        if (due > now) return due;
        ask(&callers[opened++], now);
    }
    return UINT64_MAX;
}

int main(int count, char **words) {
    struct rlimit files;
    struct epoll_event events[EVENTS];
    if (count != 9 || !prepare(words[1], words[2], words[3])) {
        fprintf(stderr, "load: see the head of load.c\n");
        return 2;
    }
    many = atoi(words[4]);
    rate = atof(words[5]);
    double ramp_s = atof(words[6]), warm_s = atof(words[7]), seconds = atof(words[8]);
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    gateway.sin_family = AF_INET;
    gateway.sin_port = htons((uint16_t)atoi(words[1]));
    gateway.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    callers = calloc((size_t)many, sizeof *callers);
    resting = calloc((size_t)many, sizeof *resting);
    poller = epoll_create1(EPOLL_CLOEXEC);
    srand(7);
    for (int index = 0; index < many; index++) callers[index] = (struct caller){.fd = -1, .index = index, .fresh = 1};
    uint64_t start_ns = now_ns();
    serial = (unsigned)(start_ns / 1000000u % 90000000u); /* other texts than any run of this day had before */
    from_ns = start_ns + (uint64_t)(warm_s * 1e9);
    until_ns = from_ns + (uint64_t)(seconds * 1e9);
    for (int begun = 0;;) {
        uint64_t now = now_ns();
        if (!begun && now >= from_ns) {
            begun = 1;
            puts("START");
            fflush(stdout);
        }
        if (now >= until_ns) break;
        uint64_t next = ask_all_due(start_ns, ramp_s, now), mark = begun ? until_ns : from_ns;
        if (mark < next) next = mark;
        now = now_ns();
        uint64_t left = next > now ? next - now : 0;
        struct timespec wait = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
        int ready = epoll_pwait2(poller, events, EVENTS, &wait, NULL);
        for (int at = 0; at < ready; at++) happened(&callers[events[at].data.u32], events[at].events);
    }
    puts("END");
    fflush(stdout);
    getchar(); /* the connections stay open until whoever looks has seen enough */
    printf("{\"seconds\": %.3f, \"good\": %llu, \"bad\": %llu, \"broken\": %llu, \"missed\": %llu, \"chunks\": %llu, "
           "\"reads\": %llu, \"single_reads\": %llu",
           seconds, good, bad, broken, missed, chunks, reads, single_reads);
    print_values("latency", &latency);
    print_values("first_chunk", &first_chunk);
    print_values("gap", &gap);
    print_values("delay", &delay);
    puts("}");
    return 0;
}
