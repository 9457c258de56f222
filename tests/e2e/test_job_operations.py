"""The operator's side of jobs: gateways and workers as processes, a real store, the real command."""

import json
import os
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from support import clients
from support.processes import COMMAND, Process, command, config, running, until
from support.redis_server import RedisServer

WITHIN_S = 60.0
REST = """
models: {{gemma-4: {{classes: [{{class: short_chat, pools: [light]}}]}}}}
health: {{interval_s: 0.2}}
jobs: {{work_in_serve: false, running_max: 1}}
shutdown: {{drain_s: {drain_s}}}
"""
ASK: dict[str, Any] = {"model": "gemma-4", "input": "Why is the sky blue?", "background": True}
LONG: dict[str, Any] = {**ASK, "max_output_tokens": 2_000, "extra_body": {"ignore_eos": True}}
ENDLESS: dict[str, Any] = {**ASK, "max_output_tokens": 30_000, "extra_body": {"ignore_eos": True}}
LANE = "gemma-4/short_chat"


@dataclass
class World:
    """One simulated backend, and a configuration file for it.

    Attributes:
        file: The configuration file.
        stack: Where what was started ends.
    """

    file: Path
    stack: AsyncExitStack

    async def serve(self) -> "Serving":
        """Start a gateway that takes jobs in."""
        process = await self.stack.enter_async_context(running("serve", "--config", str(self.file)))
        url = (await process.wait_for(r"serves (http://\S+)/v1"))[1]
        client = clients.sdk(base_url=f"{url}/v1", api_key="x", max_retries=0)
        return Serving(process, await admin_of(process), await self.stack.enter_async_context(client))

    async def worker(self) -> "Working":
        """Start a worker."""
        process = await self.stack.enter_async_context(running("worker", "--config", str(self.file)))
        await process.wait_for("runs jobs")
        return Working(process, await admin_of(process))


@dataclass
class Working:
    """A worker, with its URL for operators."""

    process: Process
    admin: str

    async def get(self, path: str) -> httpx.Response:
        """Ask the admin port."""
        async with clients.http(base_url=self.admin) as http:
            return await http.get(path)

    async def post(self, path: str) -> httpx.Response:
        """Order something of the admin port."""
        async with clients.http(base_url=self.admin) as http:
            return await http.post(path)


@dataclass
class Serving(Working):
    """A gateway that takes jobs in."""

    openai: openai.AsyncOpenAI

    async def until(self, id: str, *statuses: str) -> Any:
        """Return a job once it has one of these statuses."""
        with anyio.fail_after(WITHIN_S):
            while True:
                job = await self.openai.responses.retrieve(id)
                if job.status in statuses:
                    return job
                await anyio.sleep(0.05)

    async def until_answered(self, id: str) -> None:
        """Return once a job's answer has begun."""
        with anyio.fail_after(WITHIN_S):
            async for event in await self.openai.responses.retrieve(id, stream=True):
                if event.type == "response.output_text.delta":
                    return


async def admin_of(process: Process) -> str:
    return (await process.wait_for(r"operators: (http://[^/\s]+)"))[1]


@asynccontextmanager
async def world(
    folder: Path, store: RedisServer | None, *, drain_s: int = 60, speed: int = 20, fault: Sequence[str] = ()
) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        arguments = ("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", str(speed), *fault)
        engine = await stack.enter_async_context(running(*arguments))
        backend = (await engine.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
        rest = REST.format(drain_s=drain_s)
        if store is not None:
            rest += f"store: {{url: '{store.url}'}}\n"
        backends = {"light-0": (backend, "h100-tp1-light")}
        yield World(config(folder, backends, {"light": ["light-0"]}, rest), stack)


def lonely(folder: Path, rest: str = "") -> Path:
    """Write a configuration whose only backend is not there."""
    models = "models: {gemma-4: {classes: [{class: short_chat, pools: [light]}]}}\n"
    backends = {"light-0": ("http://127.0.0.1:9", "h100-tp1-light")}
    return config(folder, backends, {"light": ["light-0"]}, models + rest)


# ------------------------------------------------------------------ workers of their own


@pytest.mark.parametrize("kept", ["in-a-store", "beside-the-gateway"])
async def test_a_gateway_takes_jobs_in_and_a_worker_works_them_off(
    tmp_path: Path, store: RedisServer, kept: str
) -> None:
    async with world(tmp_path, store if kept == "in-a-store" else None) as site:
        serving = await site.serve()
        job = await serving.openai.responses.create(**ASK, max_output_tokens=20)
        assert (await serving.openai.responses.retrieve(job.id)).status == "queued"

        working = await site.worker()

        assert (await serving.until(job.id, "completed", "incomplete")).output_text

        async def are_sharing() -> bool:  # a store that is slow to answer is away for a moment
            views = [(await one.get("/admin/replicas")).json() for one in (serving, working)]
            return all(view["mode"] == "shared" for view in views)

        await until(are_sharing)

        async def is_ready() -> bool:  # it looks at the queue now and then
            return bool((await working.get("/readyz")).json()["ready"])

        await until(is_ready)
        for process in (working.process, serving.process):
            assert await process.end(signal.SIGTERM) == 0


async def test_a_worker_that_drains_finishes_what_it_answers(tmp_path: Path, store: RedisServer) -> None:
    async with world(tmp_path, store) as site:
        serving, working = await site.serve(), await site.worker()
        begun = await serving.openai.responses.create(**LONG)
        await serving.until_answered(begun.id)
        waits = await serving.openai.responses.create(**ASK, max_output_tokens=5)

        assert await working.process.end(signal.SIGTERM) == 0

        done = await serving.openai.responses.retrieve(begun.id)
        assert (done.status, done.usage.output_tokens if done.usage else 0) == ("incomplete", 2_000)
        assert (await serving.openai.responses.retrieve(waits.id)).status == "queued"
        await site.worker()
        await serving.until(waits.id, "completed", "incomplete")


@pytest.mark.parametrize("how", ["its-time-is-over", "a-second-signal"])
async def test_a_worker_that_must_end_gives_its_jobs_back(
    tmp_path: Path, store: RedisServer, how: str
) -> None:
    drain_s = 1 if how == "its-time-is-over" else 60
    async with world(tmp_path, store, drain_s=drain_s, speed=1) as site:
        serving, working = await site.serve(), await site.worker()
        job = await serving.openai.responses.create(**ENDLESS)
        await serving.until_answered(job.id)

        working.process.process.send_signal(signal.SIGTERM)
        await working.process.wait_for("draining: 1 jobs in flight")
        assert not (await working.get("/readyz")).json()["checks"]["not_draining"]
        assert await working.process.end(*[signal.SIGTERM] * (how == "a-second-signal")) == 0

        assert "cutting off 1 jobs in flight" in working.process.output
        assert (await serving.openai.responses.retrieve(job.id)).status == "queued"
        await serving.openai.responses.cancel(job.id)


@pytest.mark.parametrize(
    ("rest", "arguments", "says"),
    [
        ("", (), "it has no `jobs`"),
        ("jobs: {}", (), "gateway.yaml:.*name a `store`, or write `work_in_serve: false`"),
        ("jobs: {work_in_serve: false}", ("--admin", "9091"), "--admin: write it as host:port"),
    ],
    ids=["no-jobs", "limits-of-its-own", "no-address"],
)
async def test_a_worker_that_could_not_work_says_why(
    tmp_path: Path, rest: str, arguments: tuple[str, ...], says: str
) -> None:
    file = lonely(tmp_path, rest)
    async with running("worker", "--config", str(file), *arguments) as process:
        await process.wait_for(f"error: .*{says}")
        assert await process.end() == 2


# ------------------------------------------------------------------ the command and the admin port


async def metric(admin: str, line: str) -> float | None:
    """Return the value of a line of metrics, or None where there is none."""
    async with clients.http(base_url=admin) as http:
        found = re.search(rf"^{re.escape(line)} (\S+)$", (await http.get("/metrics")).text, re.MULTILINE)
    return None if found is None else float(found[1])


async def until_metric(admin: str, line: str, value: float) -> None:
    with anyio.fail_after(WITHIN_S):
        while True:
            if await metric(admin, line) == value:
                return
            await anyio.sleep(0.1)


async def test_a_drain_holds_until_it_is_undone_through_every_restart(
    tmp_path: Path, store: RedisServer
) -> None:
    async with world(tmp_path, store) as site:
        serving, first = await site.serve(), await site.worker()
        drained = await command("jobs", "drain", "--admin", serving.admin)
        job = await serving.openai.responses.create(**ASK, max_output_tokens=5)
        await until_metric(first.admin, "gateway_jobs_drained", 1)
        await first.process.wait_for("jobs are drained: workers take none")
        assert await first.process.end(signal.SIGTERM) == 0
        second = await site.worker()
        await second.process.wait_for("jobs are drained: workers take none")
        listed = await command("jobs", "list", GEMMA_GATEWAY_ADMIN=second.admin)
        view = (await second.get("/admin/jobs")).json()
        await until_metric(serving.admin, f'gateway_jobs{{lane="{LANE}",status="queued"}}', 1)

        undone = await command("jobs", "drain", "--undo", "--json", "--admin", second.admin)

        assert (drained.status, undone.status) == (0, 0)
        assert drained.out == "drained for 0 s: workers take no jobs\n"
        assert re.search(r"^drained for \d+ s: workers take no jobs$", listed.out, re.MULTILINE)
        assert re.search(rf"^{LANE} +1 +0 ", listed.out, re.MULTILINE)
        assert (view["drained"], view["jobs"][0]["status"], view["jobs"][0]["position"]) == (
            True,
            "queued",
            1,
        )
        assert undone.json == {"drained": False, "drained_for_s": None}
        await serving.until(job.id, "completed", "incomplete")
        await second.process.wait_for("jobs are no longer drained")


async def test_jobs_are_looked_at_cancelled_and_tried_again(tmp_path: Path, store: RedisServer) -> None:
    async with world(tmp_path, store, speed=1) as site:
        serving, working = await site.serve(), await site.worker()
        at = ("--admin", serving.admin)
        runs = await serving.openai.responses.create(**{**ENDLESS, "input": "tell nobody"})
        await serving.until_answered(runs.id)
        waits = await serving.openai.responses.create(**ASK, max_output_tokens=5)

        shown = await command("jobs", "show", runs.id, *at)
        other_name = runs.id.replace("resp_", "chatcmpl-")
        by_chat = await command("jobs", "show", other_name, "--json", *at)
        listed = await command("jobs", "list", "--json", *at)
        queued = (await serving.get("/admin/jobs?status=queued&limit=5")).json()["jobs"]
        cancelled = await command("jobs", "cancel", other_name, *at)
        ended = await serving.until(waits.id, "completed", "incomplete")

        assert "tell nobody" not in shown.out + listed.out
        assert re.search(rf"^lane +{LANE}, normal priority *$", shown.out, re.MULTILINE)
        assert re.search(r"^attempts +1, of which 0 failed *$", shown.out, re.MULTILINE)
        assert by_chat.json["id"] == runs.id
        name = (await working.process.wait_for(r'"event": "started", "process": "([\w.-]+)"'))[1]
        assert by_chat.json["worker"] == name
        assert (await working.get("/admin/replicas")).json()["owner"] == name
        assert [job["id"] for job in listed.json["jobs"]] == [waits.id, runs.id]
        assert [(lane["queued"], lane["in_progress"]) for lane in listed.json["lanes"]] == [(1, 1)]
        assert [(job["id"], job["position"]) for job in queued] == [(waits.id, 1)]
        assert (cancelled.status, cancelled.out) == (0, f"{runs.id} is cancelled\n")

        over = await command("jobs", "cancel", waits.id, *at)
        answered = await command("jobs", "retry", waits.id, *at)
        again = await command("jobs", "retry", other_name, "--json", "--admin", working.admin)
        begun = await serving.until(runs.id, "in_progress")
        twice = await working.post(f"/admin/jobs/{runs.id}/retry")
        refused = await working.post(f"/admin/jobs/{waits.id}/retry")
        stopped = await working.post(f"/admin/jobs/{runs.id}/cancel")

        assert (over.status, over.err) == (1, f"{waits.id} had already ended\n")
        orders = re.findall(r'"operator_cancelled_job", "id": "(\w+)"', serving.process.output)
        assert orders == [runs.id]
        assert (answered.status, answered.err) == (
            1,
            f"The job is {ended.status}: only failed and cancelled ones can be retried.\n",
        )
        assert (again.status, again.json["attempts"]) == (0, 1)
        assert begun.status == "in_progress"
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "job_ended")
        assert (twice.status_code, twice.json()["error"]["code"]) == (409, "job_not_ended")
        retries = re.findall(r'"operator_retried_job", "id": "(\w+)"', working.process.output)
        assert retries == [runs.id]
        assert (stopped.json()["status"], stopped.json()["attempts"]) == ("cancelled", 2)

        line = f'gateway_job_attempts_total{{beginning="new",lane="{LANE}",outcome="lost"}}'
        await until_metric(working.admin, line, 2)
        done = f'gateway_jobs_ended_total{{lane="{LANE}",status="{ended.status}"}}'
        assert await metric(working.admin, done) == 1
        assert await metric(working.admin, f'gateway_job_queue_seconds_count{{lane="{LANE}"}}') == 2
        assert await metric(working.admin, f'gateway_job_duration_seconds_count{{lane="{LANE}"}}') == 1
        said = re.search(r'\{.*"event": "job_ended".*\}', working.process.output)
        assert said is not None
        fields = json.loads(said[0])
        assert (fields["id"], fields["lane"], fields["status"]) == (waits.id, LANE, ended.status)
        assert (fields["attempts"], fields["failures"]) == (1, 0)


async def test_the_log_says_by_a_jobs_id_who_submitted_it_and_how_each_attempt_went(
    tmp_path: Path, store: RedisServer
) -> None:
    async with world(tmp_path, store, fault=("--fault", "error", "--fault-count", "1")) as site:
        serving, working = await site.serve(), await site.worker()

        submitted = await serving.openai.responses.with_raw_response.create(**ASK, max_output_tokens=5)
        id = submitted.parse().id
        await working.process.wait_for(rf'"event": "job_ended", "id": "{id}"')

        shown = await command("jobs", "show", id, "--admin", serving.admin)
        assert re.search(r"^last setback +The backend failed with status 500\. *$", shown.out, re.MULTILINE)
        output = serving.process.output + working.process.output
        lines = [json.loads(line) for line in output.splitlines() if line.startswith("{") and id in line]
        handed_over, failed, judged, served, ended = lines
        assert (handed_over["id"], handed_over["ending"]) == (
            submitted.headers["x-request-id"],
            "handed_over",
        )
        assert (failed["backend"], failed["ending"], failed["reason"]) == ("light-0", "failed", "status 500")
        assert (judged["event"], judged["code"]) == ("job_attempt_failed", failed["code"])
        assert (served["backend"], served["status"], "reason" in served) == ("light-0", 200, False)
        assert ended["event"] == "job_ended"
        assert [line["job"] for line in (handed_over, failed, served)] == [id] * 3


async def test_what_is_asked_for_wrongly_is_refused(tmp_path: Path, store: RedisServer) -> None:
    async with world(tmp_path, store) as site:
        serving = await site.serve()
        async with clients.http(base_url=serving.admin) as http:
            page = await http.post("/admin/jobs/drain", headers={"origin": "https://attacker.example"})
            name = await http.get("/admin/jobs", headers={"host": "attacker.example:9090"})
        answers = [
            await serving.get(f"/admin/jobs{path}")
            for path in (
                "/resp_none",
                "?status=done",
                "?limit=0",
                "?limit=1001",
                "?limit=x",
                "?limit=0000000001000",
                "?owner=a",
            )
        ]
        words = ("show", "cancel", "retry")
        missing = [await command("jobs", name, "resp_none", "--admin", serving.admin) for name in words]
        assert "an operator" not in serving.process.output
        drained = (await serving.get("/admin/jobs")).json()["drained"]

    assert [(one.status_code, one.json()["error"]["code"]) for one in (page, name)] == [
        (403, "forbidden"),
        (403, "forbidden"),
    ]
    assert drained is False
    assert [one.status_code for one in answers] == [404, 400, 400, 400, 400, 400, 400]
    assert [(one.status, one.err) for one in missing] == [(1, "There is no job resp_none.\n")] * 3


async def test_a_store_that_is_away_is_said_and_counted(tmp_path: Path, store: RedisServer) -> None:
    async with world(tmp_path, store) as site:
        serving, working = await site.serve(), await site.worker()
        store.kill()

        listed = await command("jobs", "list", "--admin", serving.admin)
        await until_metric(serving.admin, "gateway_jobs_store_away", 1)
        ready = (await working.get("/readyz")).json()

        assert (listed.status, listed.err) == (1, "The job store does not answer. Please retry.\n")
        with anyio.fail_after(WITHIN_S):
            while ready["checks"]["the_store_of_jobs_answers"]:
                ready = (await working.get("/readyz")).json()
        await anyio.to_thread.run_sync(store.start)
        await until_metric(serving.admin, "gateway_jobs_store_away", 0)
        listed = await command("jobs", "list", "--admin", serving.admin)
        assert listed.out == "no jobs are waiting or running\n"


async def test_a_worker_whose_backend_is_ejected_is_not_ready(tmp_path: Path, store: RedisServer) -> None:
    """Chats would be tried there, but jobs wait."""
    async with world(tmp_path, store, fault=("--fault", "error")) as site:
        serving, working = await site.serve(), await site.worker()
        for number in range(3):  # the same one counts once
            await serving.openai.responses.create(**{**ASK, "input": f"Count up to {number}."})
        with anyio.fail_after(WITHIN_S):
            while (ready := await working.get("/readyz")).status_code == 200:
                pass
    assert ready.json()["checks"] == {
        "a_backend_is_up": False,
        "not_draining": True,
        "the_store_of_jobs_answers": True,
    }


async def test_a_gateway_without_jobs_says_so(tmp_path: Path) -> None:
    """To an interpreter of the command's own, which loads what that needs."""
    file = lonely(tmp_path)
    async with running("serve", "--config", str(file)) as process:
        listing = [*COMMAND, "jobs", "list", "--admin", await admin_of(process)]
        said = await anyio.run_process(listing, check=False, env={**os.environ, "NO_COLOR": "1"})
    assert (said.returncode, said.stderr) == (1, b"This gateway has no `jobs` in its configuration.\n")


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (
            ("list", "--admin", "http://127.0.0.1:9"),
            1,
            "nothing answers at http://127.0.0.1:9: .*--admin URL",
        ),
        (("list", "--admin", "127.0.0.1:9090"), 2, "write it as http://host:port"),
        (("list", "--config", "FILE"), 2, "does not say where the admin port is"),
        (("list", "--config", "nothing.yaml"), 2, "nothing.yaml: cannot be read"),
        (("list", "--status", "done"), 2, "done"),
        (("show",), 2, "ID"),
    ],
)
async def test_the_command_s_exit_status(
    tmp_path: Path, arguments: tuple[str, ...], status: int, says: str
) -> None:
    file = lonely(tmp_path)
    said = await command("jobs", *(str(file) if word == "FILE" else word for word in arguments))
    assert said.status == status
    assert re.search(says, said.err)
