"""The operator's console in a real browser, in front of a real gateway with jobs and simulated backends.

The light backends are quick. The slow one has two slots and is at work for as long as a test likes.
"""

import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
import pytest
import yaml
from support import clients
from support.browser import Page, browser
from support.redis_server import own_server
from support.site import Site, simulated, site

from gateway.downstream.console_routes import READERS_MAX

FLEET = simulated(
    {"light": "h100-tp1-light", "push": "h100-tp2-push"}, prompt_tokens_details=True
) | simulated({"slow": "h100-tp1-light"}, speed=0.2)
KEYS = {name: {"sha256": sha256(name.encode()).hexdigest()} for name in ("web", "batch")}
MODELS: dict[str, Any] = {
    "gemma-4": {
        "classes": [
            {"class": "long_document", "when": {"prompt_tokens": ">= 16000"}, "pools": ["push"]},
            {"class": "short_chat", "pools": ["light"]},
        ]
    },
    "patient": {"classes": [{"class": "patient", "pools": ["slow"], "waiting": {"max_wait_s": 86_400}}]},
}
LONG = "Count from 7 to 9000."  # what a simulated backend answers without an end
LIVE = "document.querySelector('#link')?.dataset.state === 'live'"
AWAY = "document.querySelector('#link').dataset.state === 'away'"
SMALL: dict[str, Any] = {
    "fleet": {"light": FLEET["light"]},
    "pools": {"light": ["light"]},
    "models": {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
}
HELLO: Any = [{"role": "user", "content": "Why is the sky blue, Rumpelstiltskin?"}]


@dataclass
class Bench:
    """A console that is open in a browser, and the gateway that it shows."""

    site: Site
    page: Page

    async def chat(self, model: str = "gemma-4", key: str = "web", **fields: Any) -> str:
        """Have a chat answered, and return its request id."""
        body = {"model": model, "messages": HELLO, "max_tokens": 8, "stream": True, **fields}
        async with self.site.http() as http:
            answer = await http.post("/v1/chat/completions", json=body, headers=authorization(key))
        return answer.headers["x-request-id"]

    @asynccontextmanager
    async def busy(self, streams: int, key: str = "web") -> AsyncIterator[None]:
        """Have so many streams run, or wait, on the slow backend."""
        body = {"model": "patient", "messages": HELLO, "max_tokens": 5000, "stream": True}

        async def one() -> None:
            async with self.site.http() as http:
                await http.post("/v1/chat/completions", json=body, headers=authorization(key))

        async with anyio.create_task_group() as tasks:
            for _ in range(streams):
                tasks.start_soon(one)
            try:
                yield
            finally:
                tasks.cancel_scope.cancel()

    async def shown(self, selector: str) -> str:
        """Return the text of an element, once it has some."""
        found: str = await self.page.until(f"document.querySelector({json.dumps(selector)})?.innerText")
        return found


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
async def opened(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        page = await stack.enter_async_context(browser(tmp_path_factory.mktemp("browser")))
        store = stack.enter_context(own_server("valkey-9", tmp_path_factory.mktemp("store"), keeps=True))
        running = await stack.enter_async_context(
            site(
                tmp_path_factory.mktemp("site"),
                fleet=FLEET,
                backend={"limits": {"knee_seqs": 2}},
                pools={name: [name] for name in FLEET},
                models=MODELS,
                keys=KEYS,
                store={"url": store.url},
                jobs={},
            )
        )
        yield Bench(running, page)
        await running.eventually(running.idle)


@pytest.fixture
async def bench(opened: Bench) -> AsyncIterator[Bench]:
    """The console, freshly loaded; whatever it did not like, or asked of others, fails the test."""
    await opened.page.go("about:blank")  # a page before may ask a gateway that has ended
    opened.page.requested.clear()
    opened.page.complaints.clear()
    await opened.page.look_like("light")
    await opened.page.go(f"{opened.site.admin_url}/")
    await opened.page.until("document.querySelector('#link')?.dataset.state === 'live'")
    yield opened
    assert opened.page.complaints == []
    elsewhere = [url for url in opened.page.requested if not url.startswith(f"{opened.site.admin_url}/")]
    assert elsewhere == []


def place(backend: str) -> str:
    return f'[data-backend="{backend}"]'


async def test_a_gauge_moves_under_load_and_whoever_waits_is_seen(bench: Bench) -> None:
    assert await bench.shown(f"{place('slow')} .state") == "up"
    async with bench.busy(3, key="batch"):
        await bench.page.until(
            f"document.querySelector('{place('slow')} .gauge').getAttribute('aria-valuenow') === '100'"
        )
        gauge = await bench.page.js(
            f"document.querySelector('{place('slow')} .gauge').getAttribute('aria-label')"
        )
        waits = await bench.shown("#waiting-line tbody tr")

        assert gauge == "slow: 2 in flight, 100 % of its knee"
        arc = f"document.querySelector('{place('slow')} .arc').getAttribute('stroke-dasharray')"
        assert await bench.page.js(arc) == "100 100"
        assert await bench.page.js(f"document.querySelector('{place('slow')}').dataset.level") == "full"
        assert await bench.page.js(f"document.querySelector('{place('light')}').dataset.level") == "calm"
        assert waits.split("\t")[:3] == ["1", "patient", "batch"]
    await bench.page.until(
        f"document.querySelector('{place('slow')} .gauge').getAttribute('aria-valuenow') === '0'"
    )
    assert await bench.shown("#waiting-line") == "No request is waiting."


async def test_the_head_names_the_process(bench: Bench) -> None:
    owner = bench.site.gateway.name

    assert f"process {owner}" in " ".join((await bench.shown("#facts")).split())


async def test_one_of_several_says_that_its_requests_are_not_all(tmp_path: Path, opened: Bench) -> None:
    for name in ("store", "one", "other"):
        (tmp_path / name).mkdir()
    with own_server("valkey-9", tmp_path / "store") as store:
        options = {**SMALL, "store": {"url": store.url}}
        async with site(tmp_path / "one", **options) as one, site(tmp_path / "other", **options):
            await opened.page.go(f"{one.admin_url}/")
            said = json.dumps(f"requests of {one.gateway.name}, one of 2")
            facts = "document.querySelector('#facts').innerText.replace(/\\s+/g, ' ')"
            await opened.page.until(f"{LIVE} && {facts}.includes({said})")


async def test_a_small_window_names_the_process_too(bench: Bench) -> None:
    """Half a window, or a whole one at 200 %."""
    for width in (640, 1020):
        await bench.page.look_like("light", width)
        assert await bench.page.js("document.querySelector('#facts').checkVisibility()")
        assert await bench.page.js("document.documentElement.scrollWidth <= innerWidth")


async def test_a_request_opens_into_a_waterfall_with_every_candidate(bench: Bench) -> None:
    request_id = await bench.chat()
    await bench.page.click(f'tbody[data-request="{request_id}"] .opener')

    verdict = await bench.shown(".opened .verdict")
    phases = await bench.page.js(
        "[...document.querySelectorAll('.waterfall [data-phase]')].map((one) => one.dataset.phase)"
    )
    candidate = await bench.shown('.detail [data-candidate="light"]')

    assert verdict.startswith("Completed, on light, in ")
    # The first request of all connects; later ones find a connection that was kept.
    assert phases[:5] in (
        ["estimate", "wait", "connect", "first", "decode"],
        ["estimate", "wait", "first", "decode", *phases[4:5]],
    )
    assert "wait" not in phases[2:]
    assert "served it" in candidate
    assert "spare knee" in candidate
    assert request_id in await bench.shown(".opened code")
    bars = await bench.page.js(
        "[...document.querySelectorAll('.lane i')]"
        ".map(({style}) => [style.left, style.width].map(parseFloat))"
    )
    for (left, width), (following, _) in pairwise(bars):
        assert left + width <= following + 0.1
    assert bars[-1][0] + bars[-1][1] <= 100.1


async def test_a_model_that_waits_for_its_turn_is_not_called_unhealthy(bench: Bench) -> None:
    """It is well: its box says when it starts."""
    waits, is_well = await bench.page.js(f'({TURNS})("qwen", "resident", "out", "unhealthy: out")')
    assert "spark-box: not running" in waits
    assert "unhealthy" not in waits
    leaves, is_calm = await bench.page.js(f'({TURNS})("spark", "draining", "up", "swapped_out: draining")')
    assert "spark\ndraining\n" in leaves
    assert "swapped_out" not in leaves
    assert (is_well, is_calm) == (True, True)


TURNS = """(resident, does, state, kept_out) => import("/console/fleet.js").then(({ showFleet }) => {
  const backend = { pools: ["spark"], state: "up", kept_out: "", in_flight: 0, knee_seqs: 2, knee_used: 0 };
  const next = { backend: null, in_s: null };
  const waiting = { spark: { requests: 0 }, qwen: { requests: 0 } };
  const box = { state: does, backend: resident, next, waiting, quarantine: {}, reason: "" };
  const qwen = { ...backend, pools: ["qwen"] };
  showFleet({ backends: { spark: { ...backend, state, kept_out }, qwen }, boxes: { "spark-box": box } });
  const summary = document.querySelector("#fleet-summary");
  return [document.querySelector("[data-backend=spark]").innerText, summary.hidden];
})"""


async def test_a_request_that_waited_says_for_whom(bench: Bench) -> None:
    async with anyio.create_task_group() as tasks:
        async with bench.busy(2):
            await bench.page.until(f"document.querySelector('{place('slow')} .count').textContent === '2'")
            tasks.start_soon(lambda: bench.chat("patient", max_tokens=1))
            await bench.shown("#waiting-line tbody tr")
    row = await bench.page.until(
        "[...document.querySelectorAll('tbody[data-ending=completed]')]"
        ".find((one) => one.innerText.includes('patient'))?.dataset.request"
    )
    await bench.page.click(f'tbody[data-request="{row}"] .opener')

    assert "slow: at knee" in await bench.shown(".opened .verdict")
    assert "at knee" in await bench.shown('.detail [data-candidate="slow"][data-excluded="at_knee"]')


async def test_a_turn_of_a_conversation_says_what_that_saved(bench: Bench) -> None:
    said = [{"role": "user", "content": "The river runs past the old mill. " * 300}]
    await bench.chat(messages=said)
    more = [*said, {"role": "assistant", "content": "So it does."}, {"role": "user", "content": "And then?"}]
    name = await bench.chat(messages=more)
    await bench.page.click(f'tbody[data-request="{name}"] .opener')
    detail = await bench.shown(".opened")

    assert re.search(r"light found 2\s\d{3} of 2\s\d{3} prompt tokens in its prefix cache", detail)
    assert re.search(r"prefill saved, s 0\.[1-9]", detail)


async def test_a_request_that_stayed_for_its_conversation_says_so(tmp_path: Path, opened: Bench) -> None:
    replicas = ["push-0", "push-1"]
    classes = [{"class": "chat", "pools": ["push"], "waiting": {"max_wait_s": 60}}]
    said = [{"role": "user", "content": "The river runs past the old mill. " * 3_000}]
    more = [*said, {"role": "assistant", "content": "So it does."}, {"role": "user", "content": "And then?"}]
    running = site(
        tmp_path,
        fleet=simulated(dict.fromkeys(replicas, "h100-tp2-push"), speed=20.0),
        backend={"limits": {"knee_seqs": 1}},
        pools={"push": replicas},
        models={"gemma-4": {"classes": classes}},
    )
    async with running as gateway:
        bench = Bench(gateway, opened.page)
        await bench.chat(messages=said)
        client = gateway.openai()
        lasting: Any = await client.chat.completions.create(
            model="gemma-4",
            messages=HELLO,
            stream=True,
            max_tokens=50_000,
            extra_body={"ignore_eos": True},
        )
        await opened.page.go(f"{gateway.admin_url}/")
        ids: list[str] = []

        async def next_turn() -> None:
            ids.append(await bench.chat(messages=more))

        async with anyio.create_task_group() as turn:
            turn.start_soon(next_turn)
            row = "document.querySelector('#waiting-line tbody tr')?.innerText"
            waits = await opened.page.until(f"{row}?.includes('stays') && {row}")
            await lasting.close()
        await opened.page.click(f'tbody[data-request="{ids[0]}"] .opener')
        detail = await bench.shown(".opened")

    assert "stays for push-0" in waits
    assert "push-1 had room before, but push-0 has its conversation, which saved" in detail


async def test_all_of_it_works_by_keyboard(bench: Bench) -> None:
    first, second = (
        await bench.chat(),
        await bench.chat(messages=[{"role": "user", "content": "river " * 20_000}]),
    )
    await bench.page.until(f"document.querySelector('tbody[data-request=\"{second}\"]')")
    focused = "document.activeElement.closest('tbody')?.dataset.request"

    for _ in range(40):
        await bench.page.key("Tab")
        if await bench.page.js(focused):
            break
    assert await bench.page.js(focused) == second  # the newest
    await bench.page.key("ArrowDown")
    assert await bench.page.js(focused) == first
    await bench.page.key("Enter")
    assert "on light" in await bench.shown(".opened .verdict")
    assert await bench.page.js("document.activeElement.getAttribute('aria-expanded')") == "true"
    await bench.page.key("Tab")
    assert await bench.page.js("document.activeElement.innerText") == "What if…"
    await bench.page.key("Enter")
    await bench.page.until("document.querySelector('#answers [data-winner]')?.dataset.winner === 'light'")
    assert await bench.page.js("document.activeElement.id") == "past-id"
    assert await bench.page.js("document.activeElement.value") == first

    await bench.page.js(f"document.querySelector('tbody[data-request=\"{first}\"] .opener').focus()")
    await bench.page.key("Escape")
    await bench.page.until("!document.querySelector('.detail')")
    assert await bench.page.js(focused) == first


async def test_a_policy_that_nobody_has_edited_is_read_again(bench: Bench) -> None:
    await bench.page.click("#edit")
    await bench.page.until("document.querySelector('#policy').value.includes('16000')")
    await bench.page.click("#edit")
    changed = f"{await config(bench)}\n# second edition\n"
    async with clients.http(base_url=bench.site.admin_url) as http:
        await put(http, changed)

    await bench.page.click("#edit")
    await bench.page.until("document.querySelector('#policy').value.includes('second edition')")
    await edit(bench, ".replace('second', 'third')")
    await bench.page.click("#edit")
    await bench.page.click("#edit")
    assert await bench.page.js("document.querySelector('#policy').value.includes('third edition')")


async def test_another_policy_has_another_winner(bench: Bench) -> None:
    before = await config(bench)
    request_id = await bench.chat()
    await bench.page.click(f'tbody[data-request="{request_id}"] .opener')
    await bench.shown(".opened .verdict")
    await bench.page.click(".opened button")
    await bench.page.until("document.querySelector('#answers [data-winner]')")
    await bench.page.click("#edit")
    await bench.page.until("document.querySelector('#policy').value.includes('16000')")
    await edit(bench, ".replace('>= 16000', '>= 1')")
    await bench.page.key("Enter", modifiers=2)

    assert await bench.shown(".difference") == "light → push"
    assert "would match, but an earlier class already does" in await bench.shown(
        '[data-answer="edited"] .verdicts'
    )
    assert "[>= 16000] -> [>= 1]" in await bench.shown('[data-answer="edited"] .changes')
    assert "text is not kept" in await bench.shown('[data-answer="edited"]')
    assert await config(bench) == before  # nothing has changed


async def test_a_new_request_is_decided_on_the_fleet_as_it_is(bench: Bench) -> None:
    body = {"model": "patient", "messages": HELLO}
    async with bench.busy(2):
        await bench.page.until(f"document.querySelector('{place('slow')} .count').textContent === '2'")
        await bench.page.js(f"document.querySelector('#body').value = {json.dumps(json.dumps(body))}")
        await bench.page.click('#question [type="submit"]')

        assert "no backend right now" in await bench.shown('[data-answer="in-force"] .winner')
        assert "2 in flight, 100% of its knee" in await bench.shown('#answers [data-candidate="slow"]')
        assert not await bench.page.js("document.querySelector('#answers .problem') !== null")

    body["messages"] = [{"role": "user", "content": "river " * 400_000}]
    await bench.page.js(f"document.querySelector('#body').value = {json.dumps(json.dumps(body))}")
    await bench.page.click('#question [type="submit"]')
    assert "400 context_length_exceeded" in await bench.shown("#answers .problem")
    assert "context exceeded" in await bench.shown('#answers [data-candidate="slow"]')
    assert not any("Rumpelstiltskin" in json.dumps(one) for one in await kept(bench))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (".replace('>= 16000', '>= many')", "gateway.yaml:"),
        (" + '\\nnonsense: 1'", 'unknown key "nonsense"'),
    ],
)
async def test_a_policy_that_cannot_be_used_is_answered_with_its_line(
    bench: Bench, change: str, says: str
) -> None:
    await bench.page.until("document.querySelector('#body').value")
    await bench.page.click("#edit")
    await bench.page.until("document.querySelector('#policy').value.includes('16000')")
    await edit(bench, change)
    await bench.page.key("Enter", modifiers=2)

    assert says in await bench.shown('[data-answer="edited"] .problem')
    assert (
        await bench.page.js("document.querySelector('[data-answer=\"in-force\"]').dataset.winner") == "light"
    )
    refused = [one for one in bench.page.complaints if "400" in one and "/admin/explain" in one]
    assert bench.page.complaints == refused  # the browser notes that by itself
    bench.page.complaints.clear()


async def test_a_job_is_cancelled_and_tried_again(bench: Bench) -> None:
    client = bench.site.openai(api_key="web")
    options: Any = {"model": "patient", "input": LONG, "background": True, "max_output_tokens": 5000}
    job = await client.responses.create(**options)
    row = f'[data-job="{job.id}"]'
    await bench.page.until(f"document.querySelector('{row}')?.dataset.status === 'in_progress'")

    await bench.page.click(f'{row} [data-action="cancel"]')
    await bench.page.until(f"document.querySelector('{row}').dataset.status === 'cancelled'")
    assert await bench.shown("#job-message") == f"{job.id} is cancelled."
    assert (await client.responses.retrieve(job.id)).status == "cancelled"

    await bench.page.click(f'{row} [data-action="retry"]')
    await bench.page.until(f"document.querySelector('{row}').dataset.status === 'in_progress'")
    await bench.page.click(f'{row} [data-action="cancel"]')
    await bench.page.until(f"document.querySelector('{row}').dataset.status === 'cancelled'")


async def test_a_late_answer_does_not_put_an_old_state_back(bench: Bench) -> None:
    """Somebody who is told that a job runs, and clicks, would do something else than the button says."""
    client, page = bench.site.openai(api_key="web"), bench.page
    options: Any = {"model": "patient", "input": LONG, "background": True, "max_output_tokens": 5000}
    job = await client.responses.create(**options)
    await page.until(f"{row_of(job.id)}?.dataset.status === 'in_progress'")
    await page.js(ONE_LATE)
    await page.until("globalThis.isHeld")

    await page.click(f'[data-job="{job.id}"] [data-action="cancel"]')
    await page.until(f"{row_of(job.id)}.dataset.status === 'cancelled'")
    await page.js(f"{SEEN}(globalThis.seen = [], {row_of(job.id)})")
    await page.js("globalThis.release()")
    await page.until("globalThis.isLateRead && globalThis.seen.length")
    assert set(await page.js("globalThis.seen")) == {"cancelled"}


ONE_LATE = """{
const ask = globalThis.fetch;
globalThis.fetch = async (path, options) => {
  const answer = await ask(path, options);
  if (!path.startsWith("admin/jobs?") || globalThis.isHeld) return answer;
  const text = await answer.text();
  globalThis.isHeld = true;
  await new Promise((done) => (globalThis.release = done));
  answer.text = async () => ((globalThis.isLateRead = true), text);
  return answer;
};
}"""
SEEN = """((seen, row) => new MutationObserver(() => seen.push(row.dataset.status))
  .observe(row, { attributeFilter: ["data-status"] }))"""


async def test_what_an_operator_is_at_outlasts_news(bench: Bench) -> None:
    """A list that is drawn anew under the pointer loses the click, and what was selected to be copied."""
    client, page = bench.site.openai(api_key="web"), bench.page
    options: Any = {"model": "patient", "input": LONG, "background": True, "max_output_tokens": 5000}
    job = await client.responses.create(**options)
    await page.until(f"{row_of(job.id)}?.dataset.status === 'in_progress'")
    await page.js(f"globalThis.button = {row_of(job.id)}.querySelector('button')")
    await page.js(f"getSelection().selectAllChildren({row_of(job.id)}.querySelector('.id'))")
    age = f"{row_of(job.id)}.cells[6].textContent"
    before = json.dumps(await page.js(age))

    await page.until(f"{age} !== {before}")
    other = await client.responses.create(**options)
    await page.until(row_of(other.id))

    assert await page.js("getSelection().toString()") == job.id
    assert await page.js("button.isConnected")
    for one in (job.id, other.id):
        await page.click(f'[data-job="{one}"] [data-action="cancel"]')
        await page.until(f"{row_of(one)}.dataset.status === 'cancelled'")


async def test_what_is_newer_is_counted_after_a_restart(bench: Bench) -> None:
    """Another process numbers its requests anew."""
    request_id = await bench.chat()
    await bench.page.click(f'tbody[data-request="{request_id}"] .opener')
    await bench.shown(".opened .verdict")
    await bench.page.js(RESTARTED)

    assert await bench.shown("#hold") == "Held while one is open, 2 newer"


async def test_those_who_wait_keep_their_rows(bench: Bench) -> None:
    """A row that is drawn anew each second never shows its title, which names the request."""
    page, first = bench.page, "document.querySelector('#waiting-line tbody tr')"
    async with bench.busy(3):
        await page.until(first)
        waited = f"{first}.cells[5].textContent"
        before = json.dumps(await page.js(f"globalThis.first = {first}; {waited}"))
        await page.js("getSelection().selectAllChildren(document.querySelector('#facts dd'))")
        selected = await page.js("getSelection().toString()")

        await page.until(f"{waited} !== {before}")
        assert await page.js(f"{first} === first")
        assert selected
        assert await page.js("getSelection().toString()") == selected


def row_of(job: str) -> str:
    return f"document.querySelector('[data-job=\"{job}\"]')"


async def test_a_short_request_is_read_beside_one_that_took_minutes(bench: Bench) -> None:
    """Its bar is long enough to see what it is made of; the longer one's is longer all the same."""
    quick, slow = await bench.page.js(BARS)

    assert quick == pytest.approx([9.88, 9.88, 19.77], abs=0.05)
    assert slow == pytest.approx([50.0, 25.0, 25.0], abs=0.05)


async def test_what_went_wrong_is_found_among_the_rest(bench: Bench) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    good, bad = await bench.chat(), await bench.chat(hostile)
    await bench.page.until(f"document.querySelector('tbody[data-request=\"{bad}\"]')")
    await bench.page.click("#only-notable")

    await bench.page.until(f"!document.querySelector('tbody[data-request=\"{good}\"]')")
    assert "404 model not found" in await bench.shown(f'tbody[data-request="{bad}"]')
    await bench.page.js("document.querySelector('#find').focus()")
    await bench.page.write("no such thing")
    assert await bench.shown("#no-requests") == "No recent request matches."


async def test_ordinary_requests_do_not_push_out_failed_ones(bench: Bench) -> None:
    """However long the page is open: the gateway keeps 300 failed ones, too."""
    bad = await bench.chat("no-such-model")
    await bench.page.until(f"document.querySelector('tbody[data-request=\"{bad}\"]')")
    await bench.page.js(MANY_ORDINARY)
    await bench.page.until(f"!document.querySelector('tbody[data-request=\"{bad}\"]')")
    await bench.page.click("#only-notable")
    await bench.page.until(f"document.querySelector('tbody[data-request=\"{bad}\"]')")


async def test_a_request_is_found_by_its_id_wherever_it_is_kept(bench: Bench) -> None:
    """The gateway keeps more requests than it tells a console of."""
    request_id = await bench.chat()
    await bench.page.until(f"document.querySelector('tbody[data-request=\"{request_id}\"]')")
    await bench.page.js(FORGET)
    await bench.page.until(f"!document.querySelector('tbody[data-request=\"{request_id}\"]')")
    await bench.page.js("document.querySelector('#find').focus()")
    await bench.page.write(request_id)
    assert (await bench.shown("#found-request .verdict")).startswith("Completed, on light")
    assert not await bench.page.js("document.querySelector('#no-requests').checkVisibility()")

    await bench.page.js("document.querySelector('#find').value = ''")
    await bench.page.write(f"req-{0:032x}")
    await bench.page.until("document.querySelector('#found-request').innerText.includes('not kept')")
    bench.page.complaints = [one for one in bench.page.complaints if "404" not in one]


WITH_ROW = """import("/console/requests.js").then(({ forgetRequests, takeRequests }) => {
  const row = { class: "x", backend: "light", ending: "completed", status: 200, stream: true, tries: 1, at: 0,
    waited_s: 0, ttft_s: 0, ttft_target_s: null, total_s: 1, is_notable: false };
"""
MANY_ORDINARY = f"""{WITH_ROW}
  const numbered = (_, index) => ({{ ...row, id: `made-up-${{index}}`, number: 1e6 + index }});
  takeRequests(Array.from({{ length: 500 }}, numbered));
}})"""
BARS = f"""{WITH_ROW}
  forgetRequests();
  takeRequests([
    {{ ...row, id: "quick", number: 0, total_s: 0.4, waited_s: 0.1, ttft_s: 0.2 }},
    {{ ...row, id: "slow", number: 1, total_s: 120, waited_s: 60, ttft_s: 90 }},
  ]);
  const bar = (id) => document.querySelectorAll(`tbody[data-request="${{id}}"] .phases i`);
  return ["quick", "slow"].map((id) => [...bar(id)].map(({{ style }}) => parseFloat(style.width)));
}})"""
RESTARTED = f"""{WITH_ROW}
  forgetRequests();
  takeRequests([{{ ...row, id: "one", number: 0 }}, {{ ...row, id: "other", number: 1 }}]);
}})"""
FORGET = """import("/console/requests.js").then(({ forgetRequests, takeRequests }) => {
  forgetRequests();
  takeRequests([]);
})"""


async def test_what_is_old_says_since_when(tmp_path: Path) -> None:
    """Once its gateway is gone, what a page shows is no longer so; what it is asked says so, too.

    All times are by the gateway's clock, as in its log, whatever that of the browser says.
    """
    (tmp_path / "browser").mkdir()
    async with browser(tmp_path / "browser") as page:
        await page.command("Page.addScriptToEvaluateOnNewDocument", source="Date.now = () => 0")
        async with site(tmp_path, **SMALL) as running:
            await page.go(f"{running.admin_url}/")
            await page.until(f"{LIVE} && document.querySelector('#body').value")
        await page.until(AWAY)
        said = await page.js("document.querySelector('#link').innerText")
        assert re.fullmatch(r"the gateway does not answer \(last heard at [0-9:]{8}\)", said)
        assert float(await page.js("getComputedStyle(document.querySelector('#fleet')).opacity")) < 0.5
        await page.click('#question [type="submit"]')
        problem = "document.querySelector('#answers .problem')?.innerText"
        assert await page.until(problem) == "the gateway does not answer"


async def test_a_connection_that_died_without_a_word_is_replaced(opened: Bench) -> None:
    """As after a laptop has slept: the browser hears of no end, and waits for more."""
    page = opened.page
    async with passage(opened.site.admin_url) as way:
        await page.go(f"{way.url}/")
        await page.until(LIVE)
        way.dies.set()
        await page.until(AWAY)
        await page.until(LIVE)
        await page.go("about:blank")


async def test_whoever_has_to_log_in_again_is_told(opened: Bench) -> None:
    """What authenticates before a gateway sends those elsewhere whose session has expired."""
    page, console = opened.page, opened.site.gateway.console
    async with passage(opened.site.admin_url) as way:
        await page.go(f"{way.url}/")
        await page.until(LIVE)
        way.instead = b"HTTP/1.1 302 Found\r\nlocation: https://login.invalid/\r\ncontent-length: 0\r\n\r\n"
        async with page.behind():
            await opened.site.eventually(lambda: not console.readers)
        await page.until(
            "document.querySelector('#link').innerText.startsWith('redirected: load this page again')"
        )
        way.instead = b""
        await page.until(LIVE)
        await page.go("about:blank")


@dataclass
class Passage:
    """A way to a gateway. Once it `dies`, nothing comes any more on event streams that are open.

    Attributes:
        instead: What requests are answered with, instead of passing them on.
    """

    url: str
    instead: bytes = b""
    dies: anyio.Event = field(default_factory=anyio.Event)


@asynccontextmanager
async def passage(url: str) -> AsyncIterator[Passage]:
    """Pass on to the server at `url` what comes on a free port, and back."""
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    way = Passage(f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}")

    async def served(caller: anyio.abc.SocketStream) -> None:
        is_mortal = False

        async def pump(one: anyio.abc.SocketStream, other: anyio.abc.SocketStream) -> None:
            nonlocal is_mortal
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                async for data in one:
                    if one is caller and way.instead:
                        await caller.send(way.instead)
                        continue
                    if way.dies.is_set() and is_mortal:
                        await anyio.sleep_forever()
                    is_mortal = is_mortal or (b"GET /admin/live" in data and not way.dies.is_set())
                    await other.send(data)
                await other.send_eof()

        port = int(url.rpartition(":")[2])
        async with caller, await anyio.connect_tcp("127.0.0.1", port) as server:
            async with anyio.create_task_group() as pumps:
                pumps.start_soon(pump, caller, server)
                pumps.start_soon(pump, server, caller)

    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, served)
        yield way
        tasks.cancel_scope.cancel()


async def test_a_hidden_page_holds_no_connection(bench: Bench) -> None:
    """A browser has six to a gateway, for all of its tabs: with six consoles, a seventh got no answer."""
    console = bench.site.gateway.console
    await bench.site.eventually(lambda: console.readers == 1)
    async with bench.page.behind():
        await bench.site.eventually(lambda: not console.readers)
        request_id = await bench.chat()
    await bench.page.until(f"{LIVE} && document.querySelector('tbody[data-request=\"{request_id}\"]')")


async def test_a_page_that_is_refused_says_why(bench: Bench) -> None:
    """And it goes on by itself."""
    console, admin = bench.site.gateway.console, bench.site.admin_url
    await bench.page.go("about:blank")
    await bench.site.eventually(lambda: not console.readers)
    async with clients.http(base_url=admin) as http, AsyncExitStack() as others:
        for _ in range(READERS_MAX):
            await others.enter_async_context(http.stream("GET", "/admin/live"))
        await bench.page.go(f"{admin}/")
        await bench.page.until(
            f"document.querySelector('#link')?.innerText === '{READERS_MAX} consoles are open already.'"
        )
    await bench.page.until(LIVE)
    bench.page.complaints = [one for one in bench.page.complaints if "503" not in one]


async def test_a_gateway_that_is_about_to_stop_says_so(tmp_path: Path, opened: Bench) -> None:
    async with site(tmp_path, **SMALL) as running:
        await opened.page.go(f"{running.admin_url}/")
        await opened.page.until(LIVE)
        assert "about to stop" not in await opened.shown("#facts")
        await running.gateway.drain()
        await opened.page.until(
            "document.querySelector('#facts .attention')?.innerText.includes('about to stop')"
        )


async def test_jobs_are_shown_if_the_gateway_that_answers_has_them(tmp_path: Path) -> None:
    """Also if it has taken the place of one without, and if its store is away when the page is opened."""
    shown = "!document.querySelector('#jobs').hidden"
    options = dict(SMALL)
    for name in ("browser", "store"):
        (tmp_path / name).mkdir()
    async with browser(tmp_path / "browser") as page:
        with own_server("valkey-9", tmp_path / "store") as store:
            async with site(tmp_path, **options) as running:
                await page.go(f"{running.admin_url}/")
                await page.until(LIVE)
                options["admin"] = running.admin_url.removeprefix("http://")
            async with site(tmp_path, store={"url": store.url}, jobs={}, **options) as running:
                await page.until(shown)
                store.kill()
                await page.js("location.reload()")
                await page.until(f"{LIVE} && {shown}")
                assert "does not answer" in await page.until(
                    "document.querySelector('#job-message').innerText"
                )
                await page.until("document.querySelector('#facts').innerText.includes('counts alone')")
        async with site(tmp_path, **options):
            await page.until(f"{LIVE} && !({shown})")


async def test_flow_and_latency_are_drawn_from_what_has_ended(bench: Bench) -> None:
    """Where several models are used, each class has its model before it."""
    await bench.chat()
    await bench.chat("patient", max_tokens=1)
    await bench.page.go(f"{bench.site.admin_url}/")

    label = "document.querySelector('#flow-chart svg')?.getAttribute('aria-label')"
    assert await bench.page.until(f"{label}?.includes('from gemma-4 short_chat to light')")
    assert await bench.page.until(
        "document.querySelector('[data-lines=\"light\"] .half')?.getAttribute('points')"
    )
    assert await bench.shown('[data-lines="light"] .ttft .p50')


async def test_a_backend_that_gets_nothing_is_not_shown_as_up(bench: Bench) -> None:
    """One of a version that is not allowed answers, and yet no request goes to it."""
    before = await config(bench)
    document = yaml.safe_load(before)
    document["backends"]["push"]["versions"] = "< 0.1"
    async with clients.http(base_url=bench.site.admin_url) as http:
        await put(http, yaml.safe_dump(document))
        try:
            await bench.page.until(f"document.querySelector('{place('push')} .state').innerText !== 'up'")
            card = await bench.page.js(f"({{...document.querySelector('{place('push')}').dataset}})")
            assert (card["state"], card["level"]) == ("kept-out", "off")
            assert await bench.shown(f"{place('push')} .state") == "wrong version"
            assert "2 of 3 backends take requests." in await bench.shown("#fleet-summary")
            assert await bench.shown("#fleet-empty") == "Pools without any: push."
            assert await bench.shown("#fleet-unwell") == "push wrong version"
            await bench.page.click("#fleet-unwell a")
            assert await bench.page.js("document.querySelector(':target').dataset.backend") == "push"
        finally:
            await put(http, before)
    await bench.page.until("document.querySelector('#fleet-summary').hidden")


async def test_classes_of_one_name_are_told_apart(bench: Bench) -> None:
    """Two models may each have a class of the same name."""
    before = await config(bench)
    document = yaml.safe_load(before)
    for name in ("gemma-4", "patient"):
        document["models"][name]["classes"][-1]["class"] = "chat"
    async with clients.http(base_url=bench.site.admin_url) as http:
        await put(http, yaml.safe_dump(document))
        try:
            await bench.page.go(f"{bench.site.admin_url}/")
            request_id = await bench.chat()
            row = f"document.querySelector('tbody[data-request=\"{request_id}\"]')"
            assert await bench.page.until(f"{row}?.innerText.includes('gemma-4 chat')")
            async with bench.busy(3):
                assert "patient chat" in await bench.shown("#waiting-line tbody tr")
                assert "patient chat 1" in await bench.shown("#waiting-classes")
        finally:
            await put(http, before)


async def test_names_that_begin_alike_are_told_apart(bench: Bench) -> None:
    """Of each backend, the whole name is seen: in its card, at its lines, and at its end of the ribbons."""
    names = {f"frankfurt-h100-row-{name}-server-0-chats": name for name in ("light", "push")}
    renamed = {
        "backends": {
            name: {"url": bench.site.backends[server].url, "profile": "generic"}
            for name, server in names.items()
        },
        "pools": {name: [name] for name in names},
        "models": {
            f"model-{index}": {"classes": [{"class": f"quite-a-long-class-number-{index}", "pools": [name]}]}
            for index, name in enumerate(names)
        },
    }
    before = await config(bench)
    async with clients.http(base_url=bench.site.admin_url) as http:
        changed = yaml.safe_dump(yaml.safe_load(before) | renamed)
        await put(http, changed)
        try:
            for index, name in enumerate(names):
                await bench.page.until(f"document.querySelector('{place(name)}')?.dataset.state === 'up'")
                await bench.chat(f"model-{index}")
            await bench.page.go(f"{bench.site.admin_url}/")
            for name in names:
                await bench.page.until(f"document.querySelector('[data-lines=\"{name}\"] .p50')?.textContent")
                for selector in (f"{place(name)} .top strong", f'[data-lines="{name}"] strong'):
                    one = f"document.querySelector('{selector}')"
                    assert await bench.page.js(f"{one}.scrollWidth <= {one}.clientWidth"), selector
                assert name in await bench.page.js(NODES)
            assert await bench.page.js(OUTSIDE) == []
        finally:
            await put(http, before)


async def test_long_names_push_nothing_out_of_view(bench: Bench) -> None:
    before = await config(bench)
    key, backend, name = "key-" * 20, "backend-" * 10, "class_" * 13
    digest = sha256(b"long").hexdigest()
    document = yaml.safe_load(before)
    document["keys"][key] = {"sha256": digest}
    document["backends"][backend] = document["backends"].pop("slow")
    document["pools"]["slow"] = [backend]
    document["models"]["patient"]["classes"][0]["class"] = name
    job: Any = {"model": "patient", "input": LONG, "background": True, "max_output_tokens": 5000}
    async with clients.http(base_url=bench.site.admin_url) as http:
        await put(http, yaml.safe_dump(document))
        try:
            await bench.chat("patient", "long", max_tokens=1)
            running = await bench.site.openai(api_key="long").responses.create(**job)
            await bench.page.until(f"{row_of(running.id)}?.querySelector('button')")
            shown = await bench.shown("#request-table")
            assert backend in shown
            assert name in shown
            for place in ("#requests", "#job-list"):
                one = f"document.querySelector('{place}')"
                assert await bench.page.js(f"{one}.scrollWidth <= {one}.clientWidth"), place
            await bench.page.click(f'[data-job="{running.id}"] [data-action="cancel"]')
            await bench.page.until(f"{row_of(running.id)}.dataset.status === 'cancelled'")
        finally:
            await put(http, before)


async def test_the_version_of_a_nightly_build_stays_in_its_card(bench: Bench) -> None:
    version = "0.20.0rc3.dev123+g1234567.d20260101.cu129.precompiled"
    begins, name_ends = await bench.page.js(f"({VERSION})({json.dumps(version)})")
    assert begins > name_ends


VERSION = """(engine_version) => import("/console/fleet.js").then(({ showFleet }) => {
  const backend = { pools: ["a"], state: "up", kept_out: "", in_flight: 0, knee_seqs: 2, knee_used: 0 };
  showFleet({ backends: { nightly: { ...backend, engine_version } }, boxes: {} });
  const text = document.createRange();
  text.selectNodeContents(document.querySelector("[data-backend=nightly] .version"));
  const name = document.querySelector("[data-backend=nightly] dt:last-of-type");
  return [text.getBoundingClientRect().left, name.getBoundingClientRect().right];
})"""


async def test_the_first_charts_do_not_move_what_is_below_them(tmp_path: Path, opened: Bench) -> None:
    """Somebody who is about to open a request would click on another."""
    page, top = opened.page, "document.querySelector('#requests').getBoundingClientRect().top"
    await page.look_like("light")
    async with site(tmp_path, **SMALL) as running:
        await page.go(f"{running.admin_url}/")
        await page.until(f"{LIVE} && document.querySelector('.gauge')")
        before = await page.js(top)
        await Bench(running, page).chat()
        await page.until("document.querySelector('#flow svg') && document.querySelector('#latency svg')")
        assert await page.js(top) == pytest.approx(before, abs=2)


async def test_an_opened_request_can_be_read_in_a_narrow_window(bench: Bench) -> None:
    request_id = await bench.chat()
    await bench.page.look_like("light", 390, 844)
    await bench.page.click(f'tbody[data-request="{request_id}"] .opener')
    await bench.shown(".opened .verdict")
    for selector in (".verdict", ".waterfall", ".demand", "button"):
        box = f"document.querySelector('.opened {selector}').getBoundingClientRect()"
        assert await bench.page.js(f"{box}.left >= 0"), selector
        assert await bench.page.js(f"{box}.right <= innerWidth"), selector


async def test_latency_can_be_read_in_a_narrow_window(bench: Bench) -> None:
    await bench.chat()
    await bench.page.look_like("light", 390, 844)
    await bench.page.go(f"{bench.site.admin_url}/")
    lines = "document.querySelector('[data-lines=\"light\"]')"
    await bench.page.until(f"{lines}?.querySelector('.p50').textContent")

    chart = await bench.page.js(f"{lines}.querySelector('svg').getBoundingClientRect().width")
    end = await bench.page.js(f"{lines}.querySelector('.tpot .figures').getBoundingClientRect().right")
    room = await bench.page.js("document.querySelector('#latency').getBoundingClientRect().right")
    assert chart > 50
    assert end < room


NODES = """
[...document.querySelectorAll("#flow-chart .node")]
  .map((one) => [...one.querySelectorAll("text")].map((text) => text.textContent).join(""))
  .map((text) => text.replace(/ ?[0-9]+$/, ""))
"""
OUTSIDE = """{
const chart = document.querySelector("#flow-chart svg").getBoundingClientRect();
[...document.querySelectorAll("#flow-chart text")].filter((one) => {
  const { left, right } = one.getBoundingClientRect();
  return left < chart.left || right > chart.right;
}).map((one) => one.textContent)
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(390, 844), (1280, 800), (1920, 1080)])
async def test_it_can_be_read_in_light_and_dark(bench: Bench, scheme: str, size: tuple[int, int]) -> None:
    await bench.page.look_like(scheme, *size)
    ground = await bench.page.js(f"{LUMINANCE}; luminance(getComputedStyle(document.body).backgroundColor)")
    contrasts = await bench.page.js(f"{LUMINANCE}; {CONTRASTS}")

    assert (ground > 0.5) == (scheme == "light")
    assert len(contrasts) > 20
    assert {text: ratio for text, ratio in contrasts.items() if ratio < 4.5} == {}
    assert await bench.page.js("document.documentElement.scrollWidth <= innerWidth")


LUMINANCE = """
var luminance = (colour) => {
  const [red, green, blue] = colour.match(/[0-9.]+/g).map((part) => part / 255)
    .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}
"""
CONTRASTS = """
var isSeen = (one) => one.checkVisibility() && !one.closest("svg")
  && [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
var groundOf = (one) => {
  while (one && /, 0\\)$|transparent/.test(getComputedStyle(one).backgroundColor)) one = one.parentElement;
  return getComputedStyle(one ?? document.body).backgroundColor;
};
Object.fromEntries([...document.querySelectorAll("main *")].filter(isSeen).map((one) => {
  const pair = [getComputedStyle(one).color, groundOf(one)].map(luminance);
  return [one.textContent.trim().slice(0, 40), (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)];
}))
"""


async def config(bench: Bench) -> str:
    async with clients.http(base_url=bench.site.admin_url) as http:
        return (await http.get("/admin/config")).text


async def put(http: httpx.AsyncClient, changed: str) -> None:
    """Have the gateway run under this configuration."""
    answer = await http.put("/admin/config", content=changed, headers={"if-match": "*"})
    assert answer.status_code == 200, answer.text


async def kept(bench: Bench) -> list[Any]:
    async with clients.http(base_url=bench.site.admin_url) as http:
        found: list[Any] = (await http.get("/admin/requests")).json()
        return found


async def edit(bench: Bench, change: str) -> None:
    """Change the policy in the box, which is focused then."""
    await bench.page.js(
        f"{{ const box = document.querySelector('#policy'); box.value = box.value{change}; box.focus() }}"
    )
