/* An engine that does nothing but speak vLLM's wire: one thread, epoll, HTTP/1.1 with kept connections.
 *
 *     engine PORTS        listens on so many ports of its own, prints them on one line, serves until killed
 *
 *     POST /v1/chat/completions, /v1/completions    a JSON answer, or server-sent events where "stream" is true
 *     POST /v1/traces                               swallowed
 *     GET  /health, /metrics, /v1/models, /version, and what SGLang's router asks at its start
 *
 * How an answer is paced is written into the prompt, which every gateway hands on:
 *
 *     [engine chunks=0200 every_us=25000 after_us=0]
 *
 * chunks with text in them, microseconds from one to the next, and from the request to the first. Without it:
 * one chunk, at once. A chunk has the moment of its sending in its text, `@` 16 hexadecimal digits `@`, in
 * nanoseconds of CLOCK_MONOTONIC: whoever reads it on the same machine knows how long it has been under way.
 *
 * As vLLM's server does it: the head of a stream goes out at once, every event is an HTTP chunk and a write of
 * its own, the first one has the role and no text, the last ones the reason of the end, the usage if it was
 * asked for, and [DONE].
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <netinet/tcp.h>
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

enum { FILES_MAX = 65536, PORTS_MAX = 16, EVENTS = 512, READ_ROOM = 262144, ENDS_LOOKED_AT = 8192 };

struct call {
    int fd, port, listens, busy, streams, wants_usage, watches_writing;
    unsigned id;
    long chunks, sent, every_us;
    uint64_t due_ns;
    int place; /* in the heap of what is due, or -1 */
    char *in, *out;
    size_t in_bytes, in_room, out_bytes, out_done, out_room;
};

static struct call *calls[FILES_MAX], *heap[FILES_MAX];
static int heap_size, poller;
static unsigned asked;
static long running[PORTS_MAX]; /* requests, by port: each is an engine of its own */

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---------------------------------------------------------------- what is due, the earliest first */

static void put(int place, struct call *call) {
    heap[place] = call;
    call->place = place;
}

static void settle(struct call *call) {
    int place = call->place;
    while (place > 0 && heap[(place - 1) / 2]->due_ns > call->due_ns) {
        put(place, heap[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    for (;;) {
        int below = 2 * place + 1;
        if (below + 1 < heap_size && heap[below + 1]->due_ns < heap[below]->due_ns) below++;
        if (below >= heap_size || heap[below]->due_ns >= call->due_ns) break;
        put(place, heap[below]);
        place = below;
    }
    put(place, call);
}

static void schedule(struct call *call, uint64_t due_ns) {
    call->due_ns = due_ns;
    if (call->place < 0) call->place = heap_size++;
    settle(call);
}

static void unschedule(struct call *call) {
    int place = call->place;
    if (place < 0) return;
    call->place = -1;
    struct call *last = heap[--heap_size];
    if (last == call) return;
    put(place, last);
    settle(last);
}

/* ---------------------------------------------------------------- connections */

static void watch(struct call *call, int operation, int writing) {
    struct epoll_event event = {.events = EPOLLIN | (writing ? EPOLLOUT : 0), .data.fd = call->fd};
    call->watches_writing = writing;
    epoll_ctl(poller, operation, call->fd, &event);
}

static void end(struct call *call) {
    if (call->busy) running[call->port]--;
    unschedule(call);
    close(call->fd);
    calls[call->fd] = NULL;
    free(call->in);
    free(call->out);
    free(call);
}

static struct call *begin(int fd, int port, int listens) {
    struct call *call = calloc(1, sizeof *call);
    if (!call || fd >= FILES_MAX) abort();
    call->fd = fd;
    call->port = port;
    call->listens = listens;
    call->place = -1;
    calls[fd] = call;
    watch(call, EPOLL_CTL_ADD, 0);
    return call;
}

/* Returns 0, or -1 where the caller has gone. What the socket does not take is kept for later. */
static int say(struct call *call, const char *text, size_t bytes) {
    if (call->out_done == call->out_bytes) {
        ssize_t taken = send(call->fd, text, bytes, MSG_NOSIGNAL);
        if (taken < 0 && errno != EAGAIN) return -1;
        if (taken < 0) taken = 0;
        text += taken;
        bytes -= (size_t)taken;
        call->out_bytes = call->out_done = 0;
        if (!bytes) return 0;
    }
    if (call->out_bytes + bytes > call->out_room) {
        call->out_room = 2 * (call->out_bytes + bytes);
        call->out = realloc(call->out, call->out_room);
        if (!call->out) abort();
    }
    memcpy(call->out + call->out_bytes, text, bytes);
    call->out_bytes += bytes;
    if (!call->watches_writing) watch(call, EPOLL_CTL_MOD, 1);
    return 0;
}

static int answer(struct call *call, const char *status, const char *type, const char *body) {
    char text[4096];
    int bytes = snprintf(text, sizeof text, "HTTP/1.1 %s\r\nserver: uvicorn\r\ncontent-length: %zu\r\ncontent-type: %s\r\n\r\n%s",
                         status, strlen(body), type, body);
    return say(call, text, (size_t)bytes);
}

/* ---------------------------------------------------------------- answers */

static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                  "transfer-encoding: chunked\r\n\r\n";
static const char STREAM_END[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";

static int event(struct call *call, const char *choices, const char *more) {
    char text[768], framed[800];
    int bytes = snprintf(text, sizeof text,
                         "data: {\"id\":\"chatcmpl-%032x\",\"object\":\"chat.completion.chunk\",\"created\":1760000000,"
                         "\"model\":\"gemma-4\",\"choices\":[%s]%s}\n\n",
                         call->id, choices, more);
    int all = snprintf(framed, sizeof framed, "%x\r\n%s\r\n", (unsigned)bytes, text);
    return say(call, framed, (size_t)all);
}

static int piece(struct call *call, const char *delta, const char *reason) {
    char choice[512];
    snprintf(choice, sizeof choice, "{\"index\":0,\"delta\":{%s},\"logprobs\":null,\"finish_reason\":%s,\"token_ids\":null}",
             delta, reason);
    return event(call, choice, "");
}

static int last_words(struct call *call) {
    char usage[160];
    if (piece(call, "\"content\":\"\"", "\"stop\"")) return -1;
    snprintf(usage, sizeof usage, ",\"usage\":{\"prompt_tokens\":64,\"total_tokens\":%ld,\"completion_tokens\":%ld}",
             64 + call->chunks, call->chunks);
    if (call->wants_usage && event(call, "", usage)) return -1;
    return say(call, STREAM_END, sizeof STREAM_END - 1);
}

static int whole_answer(struct call *call) {
    char body[1024];
    snprintf(body, sizeof body,
             "{\"id\":\"chatcmpl-%032x\",\"object\":\"chat.completion\",\"created\":1760000000,\"model\":\"gemma-4\",\"choices\":[{"
             "\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"Every token that is generated needs all weights to be "
             "read once from memory; the arithmetic on them is done long before they arrive.\",\"refusal\":null,"
             "\"annotations\":null,\"audio\":null,\"function_call\":null,\"tool_calls\":[]},\"logprobs\":null,"
             "\"finish_reason\":\"stop\",\"stop_reason\":null}],\"service_tier\":null,\"system_fingerprint\":null,"
             "\"usage\":{\"prompt_tokens\":64,\"total_tokens\":96,\"completion_tokens\":32}}",
             call->id);
    return answer(call, "200 OK", "application/json", body);
}

static int next_request(struct call *call);

static int finished(struct call *call) {
    call->busy = 0;
    running[call->port]--;
    unschedule(call);
    return next_request(call);
}

/* Does what is due. Returns -1 where the caller has gone. */
static int step(struct call *call) {
    char delta[64];
    if (!call->streams) return whole_answer(call) ? -1 : finished(call);
    if (call->sent == 0 && piece(call, "\"role\":\"assistant\",\"content\":\"\"", "null")) return -1;
    snprintf(delta, sizeof delta, "\"content\":\" @%016llx@\"", (unsigned long long)now_ns());
    if (piece(call, delta, "null")) return -1;
    if (++call->sent >= call->chunks) return last_words(call) ? -1 : finished(call);
    schedule(call, call->due_ns + (uint64_t)call->every_us * 1000u);
    return 0;
}

/* ---------------------------------------------------------------- requests */

static char *find(char *text, size_t bytes, const char *wanted) {
    return memmem(text, bytes, wanted, strlen(wanted));
}

/* Looks at both ends of a long text: what steers an answer stands there. */
static char *find_at_ends(char *text, size_t bytes, const char *wanted) {
    if (bytes <= 2 * ENDS_LOOKED_AT) return find(text, bytes, wanted);
    char *found = find(text, ENDS_LOOKED_AT, wanted);
    return found ? found : find(text + bytes - ENDS_LOOKED_AT, ENDS_LOOKED_AT, wanted);
}

static int is_set(char *body, size_t bytes, const char *name) {
    char compact[64], spaced[64];
    snprintf(compact, sizeof compact, "\"%s\":true", name);
    snprintf(spaced, sizeof spaced, "\"%s\": true", name);
    return find_at_ends(body, bytes, compact) || find_at_ends(body, bytes, spaced);
}

static int generate(struct call *call, char *body, size_t bytes) {
    long after_us = 0;
    char *orders = find_at_ends(body, bytes, "[engine ");
    call->chunks = 1;
    call->every_us = 0;
    call->sent = 0;
    if (orders) sscanf(orders, "[engine chunks=%ld every_us=%ld after_us=%ld]", &call->chunks, &call->every_us, &after_us);
    call->streams = is_set(body, bytes, "stream");
    call->wants_usage = is_set(body, bytes, "include_usage");
    call->id = ++asked;
    call->busy = 1;
    running[call->port]++;
    schedule(call, now_ns() + (uint64_t)after_us * 1000u);
    return call->streams ? say(call, STREAM_HEAD, sizeof STREAM_HEAD - 1) : 0;
}

static int metrics(struct call *call) {
    char page[1024];
    snprintf(page, sizeof page,
             "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine=\"0\",model_name=\"gemma-4\"} %ld.0\n"
             "# TYPE vllm:num_requests_waiting gauge\nvllm:num_requests_waiting{engine=\"0\",model_name=\"gemma-4\"} 0.0\n"
             "# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine=\"0\",model_name=\"gemma-4\"} 0.0\n"
             "# TYPE vllm:generation_tokens_total counter\n"
             "vllm:generation_tokens_total{engine=\"0\",model_name=\"gemma-4\"} %llu.0\n",
             running[call->port], (unsigned long long)(now_ns() / 1000000u)); /* ever more: an engine that hangs is put out */
    return answer(call, "200 OK", "text/plain; version=0.0.4; charset=utf-8", page);
}

static int serve(struct call *call, const char *path, char *body, size_t bytes) {
    if (!strcmp(path, "/v1/chat/completions") || !strcmp(path, "/v1/completions")) return generate(call, body, bytes);
    if (!strcmp(path, "/metrics")) return metrics(call);
    if (!strcmp(path, "/health") || !strcmp(path, "/health_generate")) return answer(call, "200 OK", "text/plain", "");
    if (!strcmp(path, "/version")) return answer(call, "200 OK", "application/json", "{\"version\":\"0.20.0\"}");
    if (!strcmp(path, "/v1/traces") || !strcmp(path, "/v1/metrics"))
        return answer(call, "200 OK", "application/x-protobuf", "");
    if (!strcmp(path, "/v1/models"))
        return answer(call, "200 OK", "application/json",
                      "{\"object\":\"list\",\"data\":[{\"id\":\"gemma-4\",\"object\":\"model\",\"created\":1760000000,"
                      "\"owned_by\":\"vllm\",\"root\":\"gemma-4\",\"parent\":null,\"max_model_len\":1048576}]}");
    if (!strcmp(path, "/get_server_info") || !strcmp(path, "/server_info") || !strcmp(path, "/get_model_info") ||
        !strcmp(path, "/model_info"))
        return answer(call, "200 OK", "application/json",
                      "{\"model_path\":\"gemma-4\",\"served_model_name\":\"gemma-4\",\"is_generation\":true}");
    return answer(call, "404 Not Found", "application/json", "{\"detail\":\"Not Found\"}");
}

/* Returns the bytes of a whole request with its body at *body, 0 where more must come. */
static size_t whole_request(struct call *call, char **body, size_t *bytes) {
    char *head_end = find(call->in, call->in_bytes, "\r\n\r\n");
    if (!head_end) return 0;
    size_t head = (size_t)(head_end + 4 - call->in), arrived = call->in_bytes - head, length = 0;
    int chunked = 0;
    for (char *line = call->in; line < head_end; line = find(line, (size_t)(head_end + 2 - line), "\r\n") + 2) {
        if (!strncasecmp(line, "content-length:", 15)) length = strtoul(line + 15, NULL, 10);
        if (!strncasecmp(line, "transfer-encoding: chunked", 26)) chunked = 1;
    }
    *body = call->in + head;
    if (chunked) { /* the framing stays in: what steers an answer is found all the same */
        char *last = find(*body, arrived, "\r\n0\r\n\r\n");
        *bytes = last ? (size_t)(last - *body) : 0;
        return last ? head + *bytes + 7 : 0;
    }
    *bytes = length;
    return arrived < length ? 0 : head + length;
}

/* Begins with each request that has arrived, until one takes time. Returns -1 where the caller has gone. */
static int next_request(struct call *call) {
    while (!call->busy && call->in_bytes) {
        char path[128] = "", *body;
        size_t bytes, whole = whole_request(call, &body, &bytes);
        if (!whole) return 0;
        sscanf(call->in, "%*15s %127[^? ]", path);
        if (serve(call, path, body, bytes)) return -1;
        call->in_bytes -= whole;
        memmove(call->in, call->in + whole, call->in_bytes);
    }
    return 0;
}

static int hear(struct call *call) {
    for (;;) {
        if (call->in_room - call->in_bytes < READ_ROOM / 4) {
            call->in_room = 2 * call->in_room + READ_ROOM;
            call->in = realloc(call->in, call->in_room);
            if (!call->in) abort();
        }
        size_t room = call->in_room - call->in_bytes;
        ssize_t got = recv(call->fd, call->in + call->in_bytes, room, 0);
        if (got == 0 || (got < 0 && errno != EAGAIN)) return -1;
        if (got > 0) call->in_bytes += (size_t)got;
        if (got < (ssize_t)room) return call->busy ? 0 : next_request(call);
    }
}

static int go_on_saying(struct call *call) {
    ssize_t taken = send(call->fd, call->out + call->out_done, call->out_bytes - call->out_done, MSG_NOSIGNAL);
    if (taken < 0) return errno == EAGAIN ? 0 : -1;
    call->out_done += (size_t)taken;
    if (call->out_done == call->out_bytes) watch(call, EPOLL_CTL_MOD, 0);
    return 0;
}

static void let_in(struct call *listener) {
    int fd, yes = 1;
    while ((fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        begin(fd, listener->port, 0);
    }
}

static int listen_somewhere(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0 || bind(fd, (struct sockaddr *)&address, size) || listen(fd, 4096) ||
        getsockname(fd, (struct sockaddr *)&address, &size)) {
        perror("engine: cannot listen");
        exit(1);
    }
    begin(fd, port, 1);
    return ntohs(address.sin_port);
}

int main(int count, char **words) {
    struct rlimit files;
    struct epoll_event events[EVENTS];
    int ports = count > 1 ? atoi(words[1]) : 1;
    if (ports < 1 || ports > PORTS_MAX) return 2;
    signal(SIGPIPE, SIG_IGN);
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max < FILES_MAX ? files.rlim_max : FILES_MAX;
    setrlimit(RLIMIT_NOFILE, &files);
    poller = epoll_create1(EPOLL_CLOEXEC);
    for (int port = 0; port < ports; port++) printf("%d%c", listen_somewhere(port), port + 1 < ports ? ' ' : '\n');
    fflush(stdout);
    for (;;) {
        struct timespec wait, *for_how_long = NULL;
        if (heap_size) {
            uint64_t now = now_ns(), left = heap[0]->due_ns > now ? heap[0]->due_ns - now : 0;
            wait = (struct timespec){(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
            for_how_long = &wait;
        }
        int ready = epoll_pwait2(poller, events, EVENTS, for_how_long, NULL);
        for (int at = 0; at < ready; at++) {
            struct call *call = calls[events[at].data.fd];
            if (!call) continue;
            if (call->listens) {
                let_in(call);
                continue;
            }
            int gone = 0;
            if (call->watches_writing && events[at].events & EPOLLOUT) gone = go_on_saying(call);
            if (!gone && events[at].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) gone = hear(call);
            if (gone) end(call);
        }
        for (int done = 0; heap_size && done < EVENTS && heap[0]->due_ns <= now_ns(); done++) {
            struct call *call = heap[0];
            if (step(call)) end(call);
        }
    }
}
