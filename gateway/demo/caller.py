"""The application in the demo: an unmodified `openai` client that knows one URL.

It sees what every caller sees: answers, errors and response headers. Whether an answer is one is checked
here, so that the demo can say honestly that everything went well.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import openai
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from gateway.demo.prompts import Ask, Kind
from gateway.demo.story import Exchange, Stage, Story, SubmittedJob

_USAGE: Any = {"include_usage": True, "continuous_usage_stats": True}
"""Asks for the number of tokens in every event: vLLM's addition, for which the client has no type."""

_ENDINGS = frozenset({"stop", "length", "tool_calls"})
_ENDED = frozenset({"completed", "incomplete"})

AGAIN_S = 0.3
"""Real seconds between two looks at a job. A choice."""


class Caller:
    """Sends requests and writes down in the story what comes back."""

    def __init__(self, url: str, story: Story, now: Callable[[], float], *, timeout_s: float) -> None:
        """Call the gateway at `url`; a request that takes longer than `timeout_s` has failed."""
        self._story = story
        self._now = now
        self._client = AsyncOpenAI(
            base_url=f"{url}/v1",
            api_key="not-needed",
            timeout=timeout_s,
            # Loopback: a proxy named in the environment has no business here.
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
        )

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def send(self, ask: Ask) -> Exchange:
        """Send a request, and return when it is over. Never raises for how it ends."""
        exchange = self._story.begin(ask, self._now())
        try:
            await (self._stream(exchange) if ask.stream else self._whole(exchange))
        except openai.APIStatusError as error:
            exchange.status, exchange.code = error.status_code, str(error.code or "")
            self._read_headers(exchange, error.response.headers)
            exchange.problem = f"{error.status_code} {exchange.code}: {error.message}"
        except openai.APIError as error:  # an error event in a stream, a connection that broke, a timeout
            exchange.code = str(error.code or type(error).__name__)
            exchange.problem = f"{exchange.code}: {error.message}"
        except (ValueError, AttributeError, TypeError) as error:
            exchange.problem = f"not an OpenAI answer: {error!r}"
        exchange.stage = _verdict(exchange)
        exchange.ended_at = self._now()
        self._story.changed()
        return exchange

    async def hand_over(self, model: str, text: str, max_tokens: int) -> SubmittedJob:
        """Hand a job over, and return at once.

        Raises:
            openai.APIError: it was not accepted.
        """
        accepted = await self._client.responses.create(
            model=model, input=text, background=True, max_output_tokens=max_tokens
        )
        job = SubmittedJob(accepted.id, str(accepted.status))
        self._story.jobs.append(job)
        self._story.changed()
        return job

    async def follow(self, job: SubmittedJob) -> None:
        """Come back for a job's answer now and then, until it is over."""
        text = ""
        try:
            while not job.is_over:
                await anyio.sleep(AGAIN_S)
                found = await self._client.responses.retrieve(job.id)
                job.status, text = str(found.status), found.output_text
        except openai.APIError as error:
            job.status = f"lost: {error.message}"
        if job.status not in _ENDED or not text:
            self._story.problems.append(f"job {job.id}: {job.status}{'' if text else ', without an answer'}")
        self._story.changed()

    async def _whole(self, exchange: Exchange) -> None:
        raw = await self._client.chat.completions.with_raw_response.create(
            model=exchange.ask.model, stream=False, **exchange.ask.body
        )
        exchange.first_at = self._now()
        exchange.status = raw.http_response.status_code
        self._read_headers(exchange, raw.headers)
        answer: ChatCompletion = raw.parse()
        choice = answer.choices[0]
        exchange.text = choice.message.content or ""
        exchange.output_tokens = answer.usage.completion_tokens if answer.usage else 0
        calls = [call.function for call in choice.message.tool_calls or () if call.type == "function"]
        thought = (choice.message.model_extra or {}).get("reasoning")
        exchange.problem = _flaw(
            exchange.ask,
            answer.model,
            choice.finish_reason,
            text=exchange.text,
            thought=thought or "",
            calls=[(call.name, call.arguments) for call in calls],
        )

    async def _stream(self, exchange: Exchange) -> None:
        raw = await self._client.chat.completions.with_raw_response.create(
            model=exchange.ask.model, stream=True, stream_options=_USAGE, **exchange.ask.body
        )
        exchange.status = raw.http_response.status_code
        self._read_headers(exchange, raw.headers)
        finish, model, thought, text = "", "", "", ""
        async for chunk in raw.parse():
            model = chunk.model or model
            if chunk.usage is not None:
                exchange.output_tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                finish = choice.finish_reason or finish
                delta = choice.delta
                thinks = (delta.model_extra or {}).get("reasoning") or ""
                said = delta.content or ""
                if not thinks and not said and not delta.tool_calls:
                    continue
                if exchange.first_at is None:
                    exchange.first_at, exchange.stage = self._now(), Stage.STREAMING
                thought += thinks
                text += said
                exchange.text = text or thought
        exchange.problem = _flaw(exchange.ask, model, finish, text=text, thought=thought, calls=[])

    def _read_headers(self, exchange: Exchange, headers: Mapping[str, str]) -> None:
        exchange.request_id = headers.get("x-request-id", "")
        exchange.traffic_class = headers.get("x-gateway-class", "")
        exchange.pool = headers.get("x-gateway-pool", "")
        exchange.backend = headers.get("x-gateway-backend", "")
        tokens = headers.get("x-gateway-prompt-tokens", "")
        exchange.prompt_tokens = int(tokens) if tokens.isdigit() else None


def _verdict(exchange: Exchange) -> Stage:
    if exchange.ask.refusal:
        if exchange.code == exchange.ask.refusal and exchange.status == 400:
            return Stage.REFUSED
        exchange.problem = exchange.problem or f"answered, but {exchange.ask.refusal} was expected"
        return Stage.FAILED
    return Stage.FAILED if exchange.problem else Stage.ANSWERED


def _flaw(
    ask: Ask,
    model: str,
    finish: str,
    *,
    text: str,
    thought: str,
    calls: list[tuple[str, str]],
) -> str:
    """Return what is wrong with an answer, or "" if nothing is."""
    if model != ask.model:
        return f"the answer names the model {model!r}"
    if finish not in _ENDINGS:
        return f"it ended with finish_reason {finish!r}"
    if ask.kind is Kind.TOOLS:
        return "" if calls and _is_json(calls[0][1]) else "no tool was called"
    if ask.kind is Kind.REASONING and not thought:
        return "it came without reasoning"
    return "" if text or thought else "the answer is empty"


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
