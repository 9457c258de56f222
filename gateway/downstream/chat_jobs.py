"""Chats that use the job queue: submitted with `Prefer: respond-async`, or served synchronously as jobs.

This is decided before anything is sent, at no cost if no class of the model uses the queue: a prompt is
counted only once, either here or in the pipeline.
"""

import logging
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import anyio
from litestar import MediaType, Request, Response, get
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath

from gateway.core.chat_jobs import failure, job_id
from gateway.core.errors import GatewayError, JobNotFinished, ResponseNotFound, ShedError, StoreUnavailable
from gateway.core.idempotency import HEADER
from gateway.core.jobs import Job
from gateway.core.policy import OnDisconnect, TrafficClass, Waiting
from gateway.core.prefer import Preference, preference
from gateway.core.quirks.tool_markup import NOT_IN_STREAMS
from gateway.core.request import Endpoint, Estimate
from gateway.core.responses.chat_echo import echo_of_chat
from gateway.core.responses.replay import JobFacts
from gateway.core.responses.request import new_response
from gateway.downstream.background import Background, handover_headers, headers_kept, job_headers
from gateway.downstream.callers_jobs import retry_after_s
from gateway.downstream.keys import KeyRing
from gateway.downstream.reading import Received, Work
from gateway.downstream.relay import HttpDownstream, send_body, send_json
from gateway.downstream.response_requests import check_depth
from gateway.downstream.responses import PATH as RESPONSES
from gateway.downstream.serving import Serving
from gateway.downstream.waiting_caller import Waiter, WaitingCaller, for_submitter
from gateway.downstream.wire import WireRequest
from gateway.events import about
from gateway.pipeline import CallerStalled, Pipeline, patience_s
from gateway.pipeline.caller import KEEP_ALIVE_S
from gateway.ports import Clock, Headers

log = logging.getLogger("gateway.downstream")

PLACE_HEADER = "x-gateway-queue-position"
_TRUE = frozenset({"true", "1", "yes"})


class ChatJobs:
    """Answers chats, through the queue where required; one per process."""

    def __init__(
        self,
        *,
        background: Background,
        pipeline: Pipeline,
        keys: KeyRing,
        clock: Clock,
        serving: Serving,
    ) -> None:
        """Submit jobs to `background`, and pass everything else to `pipeline`."""
        self._background = background
        self._jobs = background.jobs
        self._pipeline = pipeline
        self._keys = keys
        self._clock = clock
        self._serving = serving

    @staticmethod
    def wants_job(request: WireRequest) -> bool:
        """Return whether a chat asks to be submitted as a job."""
        prefers = preference(request.request.headers.get("prefer"))
        return prefers.respond_async and not request.request.stream and can_be_a_job(request)

    def answering(self, request: WireRequest, received: Received) -> Work:
        """Return the work that answers a chat."""
        held = [(request, received)]  # popped: once it is a job, only the store has its body
        return partial(self._answer, held)

    async def _answer(self, held: list[tuple[WireRequest, Received]], downstream: HttpDownstream) -> None:
        request, received = held.pop()
        is_async = self.wants_job(request)
        traffic_class, estimate = await self._classified(request, is_async=is_async)
        queue = None if is_async or traffic_class is None else traffic_class.queue
        job, facts = None, None
        if is_async or queue is not None:
            job, facts = await self._handed_over(request, received, estimate, queue)
        if job is None:
            await self._pipeline.run(request, downstream, estimate)
            await downstream.finish()
            return
        headers = handover_headers(request, job, estimate)
        prefers = preference(received.headers.get("prefer"))
        if traffic_class is None or queue is None:
            del request, received
            await self._respond_async(job, facts, prefers, headers, downstream)
            return
        waiter = _waiter(request, traffic_class.waiting, queue, headers)
        del request, received, facts
        await self._served(job, waiter, downstream)

    # -------------------------------------------------------------- submitting

    async def _classified(
        self, request: WireRequest, *, is_async: bool
    ) -> tuple[TrafficClass, Estimate] | tuple[None, None]:
        """Return the class and the estimate of a request, if they matter for the queue."""
        questions = self._background.questions
        if not is_async and not (questions.may_queue(request.request.model) and can_be_a_job(request)):
            return None, None
        try:
            found = await questions.classified(request)
        except ShedError:
            found = None  # the next step reports the error
        return found or (None, None)

    async def _handed_over(
        self,
        request: WireRequest,
        received: Received,
        estimate: Estimate | None,
        queue: OnDisconnect | None,
    ) -> tuple[Job, JobFacts | None] | tuple[None, None]:
        """Submit the request as a job; see `Background.submit`.

        None: the store is unreachable, and a job is not required.

        Args:
            request: The chat.
            received: The same, as received.
            estimate: Its prompt length, if known.
            queue: What happens to the job if its caller leaves; None: the caller does not wait for it.

        Raises:
            GatewayError: it is rejected.
        """
        is_in_place = queue is not None
        wants_store = request.member("store")
        is_kept = wants_store is True if is_in_place else wants_store is not False
        # A job that ends with its caller's connection must not be found when the caller repeats the request.
        is_found_again = queue is not OnDisconnect.CANCEL
        token = secrets.token_hex(16)
        echo = echo_of_chat(request.member, request.request.model, store=is_kept)
        response = new_response(echo, token, int(request.arrival.wall_at)) | {"background": True}
        try:
            check_depth(response)
            facts = JobFacts(
                response=response,
                token=token,
                first_index=0,
                headers=headers_kept(received.headers),
                conversation={},
                is_chat=True,
                is_awaited=is_in_place,
            )
            job, known = await self._background.submit(
                request,
                facts,
                id=response["id"],
                store=is_kept,
                route=Endpoint.CHAT.value,
                body=received.body,
                estimate=estimate,
                idempotency_key=received.headers.get(HEADER) if is_found_again else None,
                replaces=is_in_place,
                status=200 if is_in_place else 202,
            )
        except GatewayError as error:
            if not (is_in_place and isinstance(error, StoreUnavailable)):
                self._serving.refused(request.arrival, error, request.request.key)
                raise
            log.warning(
                "request %s is served without the queue: %s",
                request.arrival.id,
                error,
                extra=about("queue_passed_over", id=request.arrival.id),
            )
            self._background.revoke(response["id"])  # it may have been accepted all the same
            return None, None
        log.info(
            "request %s became job %s",
            request.arrival.id,
            job.id,
            extra=about("request_queued", id=request.arrival.id, job=job.id),
        )
        return job, known

    async def _respond_async(
        self,
        job: Job,
        facts: JobFacts | None,
        prefers: Preference,
        headers: Headers,
        downstream: HttpDownstream,
    ) -> None:
        """Send the chat completion if it is ready in time, or else the location of the job."""
        headers = (*headers, (b"preference-applied", prefers.applied.encode()))
        try:
            with self._jobs.waits.of_a_caller(), self._jobs.waits.until_end():
                job = await self._jobs.finished(job, prefers.granted_s)
            if job.status.is_final:
                if (failed := failure(job)) is not None:
                    raise failed
                await send_body(await self._jobs.answer(job), downstream, headers=headers)
                return
            response = await self._jobs.response(job, facts)
        except GatewayError as reason:
            error = for_submitter(reason)
            error.headers = (*headers, *error.headers)
            raise error from None
        again_s = str(retry_after_s(response["queue"])).encode()
        where = ((b"location", f"{RESPONSES}/{job.id}".encode()), (b"retry-after", again_s))
        await send_json(response, downstream, 202, (*headers, *where))

    async def _served(self, job: Job, waiter: Waiter, downstream: HttpDownstream) -> None:
        in_place = WaitingCaller(waiter, self._jobs, downstream, self._clock)
        with self._jobs.waits.of_a_caller():
            try:
                with self._jobs.waits.until_end() as wait:
                    await in_place.serve(job)
                if wait.cancelled_caught:
                    await in_place.cut(job)
            except (anyio.get_cancelled_exc_class(), CallerStalled, OSError):
                if not self._serving.is_ending:
                    await in_place.left(job)
                raise

    # -------------------------------------------------------------- fetching

    def handlers(self) -> Sequence[BaseRouteHandler]:
        """Return the route handlers for chat completions that were jobs."""

        @get(Endpoint.CHAT.value + "/{completion_id:str}")
        async def retrieve(request: Request[Any, Any, Any], completion_id: FromPath[str]) -> Response[bytes]:
            key = self._keys.name_of(request.headers)
            found = job_id(completion_id)
            job = None if found is None else await self._jobs.get(key, found)
            if job is None or not (await self._jobs.facts(job)).is_chat:
                raise _gone(completion_id)
            if not job.status.is_final:
                place = await self._jobs.place(job)
                message = f"The chat completion {completion_id!r} is not finished: it is {job.status}."
                raise JobNotFinished(message, retry_after_s=retry_after_s(place))
            if (failed := failure(job)) is not None:
                raise failed
            try:
                body = await self._jobs.answer(job)
            except ResponseNotFound:
                raise _gone(completion_id) from None
            headers = {name.decode(): value.decode() for name, value in job_headers(job)}
            return Response(body, media_type=MediaType.JSON, headers=headers)

        return [retrieve]


def can_be_a_job(request: WireRequest) -> bool:
    """Return whether engines can stream the answer, as jobs require."""
    return not any(request.member(name) for name in NOT_IN_STREAMS)


def _gone(id: str) -> ResponseNotFound:
    message = f"No chat completion {id[:64]!r} is kept for this key: only those of jobs are, for a time."
    return ResponseNotFound(message)


def _waiter(request: WireRequest, waiting: Waiting, queue: OnDisconnect, headers: Headers) -> Waiter:
    asked, arrived_at = request.request, request.arrival.received_at
    wait_s, silent_s = patience_s(asked.headers), waiting.keep_alive_after_s
    return Waiter(
        key=asked.key,
        headers=headers,
        stream=asked.stream,
        include_usage=asked.include_usage,
        silent_until=arrived_at + (KEEP_ALIVE_S if silent_s is None else silent_s),
        deadline=None if wait_s is None else arrived_at + wait_s,
        wants_place=asked.headers.get(PLACE_HEADER, "").lower() in _TRUE,
        on_disconnect=queue,
    )
