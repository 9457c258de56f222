"""Measures the estimate: error per kind of text, time per size, hostile texts. Can fit the weights anew.

    python benchmarks/estimate.py                            times of class counts
    python benchmarks/estimate.py --vocab gemma4.tiktoken    times of both, and errors of class counts
    python benchmarks/estimate.py --vocab tokenizer.json     the same, and errors of both against `tokenizers`
    python benchmarks/estimate.py --fit tokenizer.json       new weights for gateway/core/class_counts.py

The texts are those of the machine it runs on (documentation, manuals, message catalogues, sources;
`--corpus DIR` adds a tree) and seeded synthetic ones. Files whose path hashes odd are fitted on, the
others measured on, so no figure comes from a text that the weights have seen.
"""

import argparse
import base64
import gzip
import hashlib
import importlib.metadata
import os
import platform
import random
import string
import struct
import sysconfig
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean

import anyio
import anyio.lowlevel

from gateway.core.class_counts import WEIGHTS, class_count_tokens, classes
from gateway.core.policy import TemplateCosts
from gateway.core.request import Prompt, Turn
from gateway.tokenizer import PromptEstimator, Vocabulary, count_text, load

TEXTS_PER_KIND = 60
FILES_PER_KIND = 40
FILE_BYTES_MAX = 3_000_000
SIZES_CHARS = (600, 64_000)
TOKENS_MIN = 1000  # what an error is reported for; the fit takes shorter texts too
FIT_TOKENS_MIN = 200
RIDGE = 1e-3
STALL_RUNS = 3
Count = Callable[[str], int]

_SUFFIXES = {
    ".py": "python",
    ".h": "c_headers",
    ".js": "javascript",
    ".ts": "typescript",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".html": "html",
    ".svg": "xml",
    ".xml": "xml",
    ".md": "markdown",
    ".rst": "markdown",
    ".txt": "plain_en",
    ".log": "log",
    ".tex": "latex",
    ".sh": "shell",
}
_COMMON = frozenset({"de", "fr", "es", "pt_BR", "it", "ja", "ko", "zh_CN", "ru"})
_LANGUAGES = (
    *("de", "fr", "es", "it", "pt_BR", "nl", "pl", "cs", "hu", "fi", "sv", "tr", "vi", "id", "ro", "el"),
    *("ru", "uk", "bg", "sr", "ar", "fa", "he", "hi", "bn", "ta", "te", "th", "ka", "hy", "am", "km"),
    *("ja", "ko", "zh_CN", "zh_TW"),
)


def kind_of(path: Path) -> str | None:
    """Return the kind of text a file holds, or None to leave it out."""
    parts, name = path.parts, path.name
    if "LC_MESSAGES" in parts and name.endswith(".mo"):
        language = parts[parts.index("LC_MESSAGES") - 1]
        return f"catalogue_{language}" if language in _LANGUAGES else None
    if "man" in parts and name.endswith(".gz"):
        section = parts[parts.index("man") + 1]
        return "manual_en" if section.startswith("man") else f"manual_{section}"
    if name == "copyright":
        return "licence"
    if name.startswith("changelog"):
        return "changelog"
    if name.endswith((".min.js", ".min.mjs")):
        return "minified_js"
    if name.startswith(("README", "NEWS", "FAQ", "TODO", "INSTALL")) and not name.endswith((".html", ".js")):
        return "plain_en"
    return _SUFFIXES.get(Path(name.removesuffix(".gz")).suffix)


def read_text(path: Path) -> str:
    """Return a file's text; "" if it has none worth measuring."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        if path.suffix == ".mo":
            return catalogue(data)
        return data.decode()
    except (OSError, ValueError, EOFError, struct.error):
        return ""


def catalogue(data: bytes) -> str:
    """Return the translations in a compiled message catalogue, one per line."""
    order = "<" if data[:4] == b"\xde\x12\x04\x95" else ">"
    count, _, table = struct.unpack_from(f"{order}3I", data, 8)
    lines = []
    for index in range(1, count):  # the first is the header
        length, start = struct.unpack_from(f"{order}2I", data, table + 8 * index)
        lines.append(data[start : start + length].replace(b"\0", b"\n").decode())
    return "\n".join(lines)


def files(roots: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the files found under `roots`, by kind, in an order that depends on their names alone."""
    found: dict[str, list[Path]] = {}
    for root in roots:
        for path in root.rglob("*"):
            kind = kind_of(path)
            if kind and path.is_file() and not path.is_symlink() and path.stat().st_size <= FILE_BYTES_MAX:
                found.setdefault(kind, []).append(path)
    for paths in found.values():
        paths.sort(key=lambda path: hashlib.blake2b(str(path).encode()).digest())
    return found


def is_fitted_on(path: Path) -> bool:
    """Return which half of the files this one belongs to."""
    return hashlib.blake2b(path.name.encode()).digest()[0] % 2 == 1


def cut(text: str, dice: random.Random) -> str:
    """Return a stretch of `text` whose length is spread evenly over the orders of magnitude."""
    low, high = SIZES_CHARS
    size = round(low * (high / low) ** dice.random())
    start = dice.randrange(max(1, len(text) - size))
    return text[start : start + size]


# ------------------------------------------------------------------ synthetic texts


def synthetic(dice: random.Random) -> Mapping[str, Callable[[int], str]]:
    """Return makers of text that machines write: each takes a length in characters."""

    def lines(make: Callable[[], str]) -> Callable[[int], str]:
        return lambda size: "".join(make() + "\n" for _ in range(size // 20 + 1))[:size]

    def letters(alphabet: str) -> Callable[[int], str]:
        return lambda size: "".join(dice.choices(alphabet, k=size))

    def access() -> str:
        path = "/".join(dice.choices(("api", "v1", "users", "static", "img", "search", "item", "cart"), k=3))
        return (
            f"{dice.randrange(256)}.{dice.randrange(256)}.{dice.randrange(256)}.{dice.randrange(256)} - - "
            f"[{dice.randrange(1, 29):02}/Mar/2026:{dice.randrange(24):02}:{dice.randrange(60):02}:00 +0000] "
            f'"GET /{path}/{dice.randrange(10**5)} HTTP/1.1" {dice.choice((200, 304, 404))} '
            f'{dice.randrange(10**6)} "-" "Mozilla/5.0 (X11; Linux x86_64)"'
        )

    def event() -> str:
        level = dice.choice(("INFO", "DEBUG", "WARN", "ERROR"))
        return (
            f"2026-03-{dice.randrange(1, 29):02}T{dice.randrange(24):02}:{dice.randrange(60):02}:17."
            f"{dice.randrange(1000):03}Z {level} [worker-{dice.randrange(64)}] com.example.Service: request "
            f"{uuid.UUID(int=dice.getrandbits(128))} took {dice.randrange(5000)} ms"
        )

    def record() -> str:
        return (
            f'{{"id":{dice.randrange(10**7)},"name":"user_{dice.randrange(999)}","score":{dice.random():.4f},'
            f'"tags":["a{dice.randrange(9)}","b"],"active":{dice.choice(("true", "false"))}}}'
        )

    emoji = "".join(chr(code) for code in (*range(0x1F600, 0x1F650), *range(0x1F300, 0x1F380)))
    return {
        "base64": lambda size: base64.b64encode(dice.randbytes(size)).decode()[:size],
        "base64_lines": lambda size: base64.encodebytes(dice.randbytes(size)).decode()[:size],
        "uuid": lines(lambda: str(uuid.UUID(int=dice.getrandbits(128)))),
        "hex": lambda size: dice.randbytes(size // 2 + 1).hex()[:size],
        "numbers": lines(lambda: " ".join(str(dice.randrange(10**6)) for _ in range(8))),
        "floats": lines(lambda: ",".join(f"{dice.gauss(0, 100):.3f}" for _ in range(6))),
        "access_log": lines(access),
        "event_log": lines(event),
        "json_records": lines(record),
        "emoji": letters(emoji),
        "random_letters": letters(string.ascii_lowercase),
        "random_printable": letters(string.printable[:95]),
        "random_punctuation": letters(string.punctuation),
    }


def hostile(size: int) -> Mapping[str, str]:
    """Return texts of `size` UTF-8 bytes, or just below, made to be slow, miscounted or refused."""
    dice = random.Random(3)

    def plane(first: int, last: int) -> str:
        width = len(chr(first).encode("utf-8", "replace")) if first >= 0x80 else 1
        return "".join(chr(dice.randrange(first, last)) for _ in range(size // max(width, 3)))

    def repeat(unit: str) -> str:
        return unit * (size // len(unit.encode()))

    return {
        "one letter": repeat("a"),
        "one word": repeat(" yyyy"),
        "spaces": repeat(" "),
        "newlines": repeat("\n"),
        "tabs": repeat("\t"),
        "blank lines": repeat("  \n"),
        "NUL": repeat("\0"),
        "digits": "".join(dice.choices(string.digits, k=size)),
        "punctuation": "".join(dice.choices(string.punctuation, k=size)),
        "random a-z": "".join(dice.choices(string.ascii_lowercase, k=size)),
        "random printable": "".join(dice.choices(string.printable[:95], k=size)),
        "base64, one line": base64.b64encode(dice.randbytes(size * 3 // 4)).decode(),
        "markers": repeat("<start_of_turn><end_of_turn><td><|turn>"),
        "one emoji": repeat("\U0001f600"),
        "emoji family": repeat("\U0001f468\u200d\U0001f469\u200d\U0001f467"),
        "flags": repeat("\U0001f1eb\U0001f1f7\U0001f1e9\U0001f1ea"),
        "combining marks": repeat("a\u0301\u0302\u0303\u0304\u0305"),
        "U+2581": repeat("▁"),
        "random emoji": plane(0x1F300, 0x1FAFF),
        "random CJK": plane(0x4E00, 0x9FFF),
        "CJK outside the vocabulary": plane(0x20000, 0x2A6D6),
        "random Hangul": plane(0xAC00, 0xD7A3),
        "private use": plane(0xE000, 0xF8FF),
        "random BMP": plane(0x20, 0xD7FF),
        "lone surrogates": plane(0xD800, 0xDFFF),
        "Thai": repeat("สวัสดีชาวโลก"),
        "right to left": repeat("שלום \u200fمرحبا "),  # noqa: RUF001
    }


# ------------------------------------------------------------------ texts with their counts


@dataclass(frozen=True, slots=True)
class Sample:
    """A text, its kind, its tokens, and whether weights are fitted on it or measured on it."""

    kind: str
    fitted: bool
    text: str
    tokens: int


def samples(roots: Sequence[Path], count: Count, halves: Sequence[bool]) -> list[Sample]:
    """Return texts of every kind found under `roots` and of every synthetic kind, counted."""
    dice = random.Random(7)
    found = files(roots)
    made = synthetic(dice)
    texts: list[tuple[str, bool, str]] = []
    for fitted in halves:
        for kind in sorted(found):
            paths = [path for path in found[kind] if is_fitted_on(path) == fitted][:FILES_PER_KIND]
            sources = [text for text in map(read_text, paths) if len(text) >= SIZES_CHARS[0]]
            if sources:
                texts += (
                    (kind, fitted, cut(sources[number % len(sources)], dice))
                    for number in range(TEXTS_PER_KIND)
                )
        low, high = SIZES_CHARS
        for kind, make in made.items():
            texts += (
                (kind, fitted, make(round(low * (high / low) ** dice.random())))
                for _ in range(TEXTS_PER_KIND)
            )
        half = [text for text in texts if text[1] == fitted]
        for _ in range(2 * TEXTS_PER_KIND):
            texts.append(("mixed", fitted, dice.choice(half)[2] + "\n" + dice.choice(half)[2]))
    return [Sample(kind, fitted, text, count(text)) for kind, fitted, text in texts]


# ------------------------------------------------------------------ fit


def importance(kind: str) -> float:
    """Return how much a kind counts in the fit: what gateways mostly see counts most. A judgement."""
    family, _, language = kind.partition("_")
    if family in ("catalogue", "manual") and language != "en":
        return 0.5 if language in _COMMON else 0.25
    return {"random_letters": 0.1, "random_punctuation": 0.1, "random_printable": 0.3, "emoji": 0.3}.get(
        kind, 1.0
    )


def fit(texts: Sequence[Sample]) -> dict[bytes, float]:
    """Return weights for the patterns in use that minimise the squared relative error, by importance."""
    patterns = list(WEIGHTS)
    size = len(patterns)
    per_kind: dict[str, int] = {}
    for sample in texts:
        per_kind[sample.kind] = per_kind.get(sample.kind, 0) + 1
    matrix = [[0.0] * size for _ in range(size)]
    vector = [0.0] * size
    total = 0.0
    for sample in texts:
        letters = classes(sample.text)
        row = [letters.count(pattern) / sample.tokens for pattern in patterns]
        weight = importance(sample.kind) / per_kind[sample.kind]
        total += weight
        for i, value in enumerate(row):
            if value:
                vector[i] += weight * value
                line, scaled = matrix[i], weight * value
                for j, other in enumerate(row):
                    line[j] += scaled * other
    for i in range(size):
        matrix[i][i] *= 1 + RIDGE
        matrix[i][i] += 1e-9
    found = solve(matrix, vector)
    # Least squares on relative error lean low, because what is under can only be 100 % under: take that out.
    mean = sum(value * weight for value, weight in zip(vector, found, strict=True)) / total
    return {pattern: weight / mean for pattern, weight in zip(patterns, found, strict=True)}


def solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Return x with matrix x = vector, by elimination with row pivoting."""
    size = len(vector)
    rows = [[*line, value] for line, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda j: abs(rows[j][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for j in range(i + 1, size):
            factor = rows[j][i] / rows[i][i]
            if factor:
                rows[j] = [a - factor * b for a, b in zip(rows[j], rows[i], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found


# ------------------------------------------------------------------ reports


def report_errors(name: str, texts: Sequence[Sample], count: Count, per_kind: bool) -> None:
    """Print how far `count` is from the true counts, per kind of text and over all of them."""
    errors: list[float] = []
    kind_means: list[float] = []
    print(f"\n## {name}, texts of {TOKENS_MIN} tokens or more, error in %\n")
    print("| kind | texts | bias | mean | p95 | worst under | worst over |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")

    def line(label: str, found: Sequence[float], mean: float) -> str:
        spread = sorted(map(abs, found))
        p95 = spread[min(len(spread) - 1, int(0.95 * len(spread)))]
        values = (fmean(found), mean, p95, min(found), max(found))
        return f"| {label} | {len(found)} | " + " | ".join(f"{value:.2f}" for value in values) + " |"

    for kind, group in groupby(sorted(texts, key=lambda sample: sample.kind), key=lambda sample: sample.kind):
        found = [
            100 * (count(sample.text) / sample.tokens - 1) for sample in group if sample.tokens >= TOKENS_MIN
        ]
        if found:
            mean = fmean(map(abs, found))
            errors += found
            kind_means.append(mean)
            if per_kind:
                print(line(kind, found, mean))
    print(line("**all kinds alike**", errors, fmean(kind_means)))
    share = 100 / len(errors)
    inside, above = (
        sum(abs(error) <= 10 for error in errors),
        sum(1.1 * (1 + error / 100) < 1 for error in errors),
    )
    print(f"\nWithin 10 %: {share * inside:.1f} % of the texts; above the band: {share * above:.1f} %.")


def cpu_ms(count: Count, text: str) -> float:
    """Return the least CPU time of this thread over a few calls, in ms."""
    best = float("inf")
    for _ in range(3 if len(text) > 500_000 else 9):
        started = time.thread_time()
        count(text)
        best = min(best, time.thread_time() - started)
    return 1000 * best


def report_times(counters: Mapping[str, Count], roots: Sequence[Path]) -> None:
    """Print CPU time per size, over ordinary texts and over hostile ones."""
    prose = "".join(text for text in map(read_text, sorted(roots[0].rglob("copyright"))[:400]))
    code = "".join(read_text(path) for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:120])
    figures = synthetic(random.Random(5))["access_log"](4_200_000)
    ordinary = {"prose": prose, "code": code, "log": figures}
    print("\n## CPU time of the counting thread, ms\n")
    print("| counter | text | 1 KB | 16 KB | 256 KB | 1 MB | 4 MB |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, count in counters.items():
        for label, text in ordinary.items():
            repeated = text * (4_194_304 // max(1, len(text)) + 1)
            sizes = (1024, 16_384, 262_144, 1_048_576, 4_194_304)
            times = " | ".join(f"{cpu_ms(count, repeated[:size]):.2f}" for size in sizes)
            print(f"| {name} | {label} | {times} |")


def report_hostile(counters: Mapping[str, Count], truth: Count | None) -> None:
    """Print wall time and error on 1 MB of each hostile text."""
    print("\n## Hostile texts, 1 MB each: wall ms" + (", error in %" if truth else "") + "\n")
    print("| text | " + " | ".join(counters) + " |")
    print("| --- | " + " | ".join("---:" for _ in counters) + " |")
    for label, text in hostile(1_000_000).items():
        cells = []
        expected = truth(text) if truth else None
        for count in counters.values():
            started = time.perf_counter()
            tokens = count(text)
            cell = f"{1000 * (time.perf_counter() - started):.0f}"
            cells.append(cell if expected is None else f"{cell} ({100 * (tokens / expected - 1):+.2f})")
        print(f"| {label} | " + " | ".join(cells) + " |")


async def longest_stall_ms(estimator: PromptEstimator, prompt: Prompt) -> float:
    """Return the longest the event loop stood still while a prompt was estimated, in ms.

    In CPU time of this process, so that other load on the machine does not show.
    """
    gaps = [0.0]

    async def heart() -> None:
        beat = time.process_time()
        while True:
            await anyio.lowlevel.checkpoint()
            now = time.process_time()
            gaps.append(now - beat)
            beat = now

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(heart)
        await anyio.sleep(0.01)
        await estimator.estimate(prompt, TemplateCosts(), 16_000_000)
        tasks.cancel_scope.cancel()
    return 1000 * max(gaps)


def report_stalls(vocabularies: Mapping[str, Vocabulary | None]) -> None:
    """Print how long the event loop stands still while hostile prompts are estimated beside it."""
    print("\n## Longest stall of the event loop while 1 MB is estimated, CPU ms, worst of three\n")
    print("| text | " + " | ".join(vocabularies) + " |")
    print("| --- | " + " | ".join("---:" for _ in vocabularies) + " |")
    texts = dict(hostile(1_000_000))
    prompts = {name: Prompt(turns=(Turn("user", (text,)),)) for name, text in texts.items()}
    prompts["old thoughts"] = Prompt(turns=(Turn("assistant", ("<|channel>a<channel|>" * 45_000,)),))
    prompts["10,000 messages"] = Prompt(turns=(Turn("user", ("hi",)),) * 10_000)
    for name, prompt in prompts.items():
        cells = []
        for vocabulary in vocabularies.values():
            stalls = [
                anyio.run(longest_stall_ms, PromptEstimator(vocabulary), prompt) for _ in range(STALL_RUNS)
            ]
            cells.append(f"{max(stalls):.1f}")
        print(f"| {name} | " + " | ".join(cells) + " |")


def reference(path: Path) -> Count:
    """Return a counter that is Hugging Face's own."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))

    def count(text: str) -> int:
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return len(tokenizer.encode(text, add_special_tokens=False).ids)

    return count


def counter(vocabulary: Vocabulary | None) -> Count:
    """Return the gateway's own counter."""
    return lambda text: count_text(vocabulary, text)[0]


def main() -> None:
    """Parse the arguments and print what they ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=Path, help="a built .tiktoken file, or a tokenizer.json")
    parser.add_argument("--fit", type=Path, help="a tokenizer.json to fit the weights of class counts on")
    parser.add_argument("--corpus", type=Path, action="append", default=[], help="one more tree of texts")
    options = parser.parse_args()
    roots = [Path("/usr/share/doc"), Path("/usr/share/man"), Path("/usr/share/locale"), Path("/usr/include")]
    roots += [Path("/var/log"), Path(sysconfig.get_path("stdlib")), *options.corpus]
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("tiktoken", "tokenizers"))
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}"
    print(f"{machine}, Python {platform.python_version()}, {versions}")
    if options.fit:
        vocabulary = load(options.fit)
        weights = fit([s for s in samples(roots, counter(vocabulary), (True,)) if s.tokens >= FIT_TOKENS_MIN])
        print("WEIGHTS: dict[bytes, float] = {")
        for pattern, weight in weights.items():
            print(f'    b"{pattern.decode()}": {weight:.3f},')
        print("}")
        return
    if options.vocab is None:
        report_times({"class counts": class_count_tokens}, roots)
        report_hostile({"class counts": class_count_tokens}, None)
        report_stalls({"class counts": None})
        return
    vocabulary = load(options.vocab)
    is_source = options.vocab.suffix == ".json"
    truth = reference(options.vocab) if is_source else counter(vocabulary)
    texts = samples(roots, truth, (False,))
    report_errors("Class counts", texts, class_count_tokens, per_kind=True)
    if is_source:
        report_errors("The site's vocabulary", texts, counter(vocabulary), per_kind=False)
    counters = {"vocabulary": counter(vocabulary), "class counts": class_count_tokens}
    report_times(counters, roots)
    report_hostile(counters, truth)
    report_stalls({"vocabulary": vocabulary, "class counts": None})


if __name__ == "__main__":
    main()
