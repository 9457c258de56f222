"""The ways vLLM says no, in its own shapes and words."""

import json
from collections.abc import Mapping, Sequence


class Refusal(Exception):
    """An answer other than success: a status and a JSON body."""

    def __init__(self, status: int, body: object) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")


def field_problem(
    kind: str, location: str, message: str, value: object, context: Mapping[str, object] | None = None
) -> Mapping[str, object]:
    """Return what is said of a member of a request that has the wrong type. For `malformed`."""
    said = {"type": kind, "loc": location, "msg": message, "input": describe(value)}
    return {**said, "ctx": context} if context else said


def error(status: int, kind: str, message: str, param: str | None = None) -> Refusal:
    """Return a refusal in the envelope of the API."""
    return Refusal(status, {"error": {"message": message, "type": kind, "param": param, "code": status}})


def bad_request(message: str, param: str | None = None, value: object = None) -> Refusal:
    """Return a 400 about what a request means; `param` and `value` are repeated in the message."""
    if param is not None:
        detail = f"parameter={param}" if value is None else f"parameter={param}, value={value}"
        message = f"{message} ({detail})"
    return error(400, "BadRequestError", message, param)


def malformed(problems: Sequence[Mapping[str, object]]) -> Refusal:
    """Return a 400 about JSON or member types: the one whose `type` has a space."""
    noun = "error" if len(problems) == 1 else "errors"
    lines = [f"{len(problems)} validation {noun}:", *(f"  {problem!r}" for problem in problems)]
    return error(400, "Bad Request", "\n".join(lines), str(problems[0]["loc"]))


def unsupported_media() -> Refusal:
    """Return the 400 about a body that is not declared to be JSON."""
    text = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
    return error(400, "Bad Request", text)


def unknown_model(asked: str, served: str) -> Refusal:
    """Return the 404 about a model name."""
    return error(
        404, "NotFoundError", f"The model `{asked}` does not exist. Valid aliases: {served}.", "model"
    )


def too_many_chars(window: int, chars: int, chars_max: int) -> Refusal:
    """Return the 400 about a prompt refused before it is tokenised."""
    return bad_request(
        f"This model's maximum context length is {window} tokens. However, your prompt contains {chars} "
        f"characters (more than {chars_max} characters, which is the upper bound for {window} input tokens). "
        "Please reduce the length of the input prompt.",
        "input_text",
        chars,
    )


def too_many_tokens(window: int) -> Refusal:
    """Return the 400 about an over-long prompt. The true length is never told."""
    return bad_request(
        f"This model's maximum context length is {window} tokens. However, your prompt contains at least "
        f"{window + 1} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt.",
        "input_tokens",
        window + 1,
    )


def describe(value: object) -> str:
    """Return how a message shows a value it objects to."""
    if isinstance(value, dict):
        return f"<dict of {len(value)} items>"
    if isinstance(value, list):
        return f"<list of {len(value)} items>"
    return str(value)


def busy() -> Refusal:
    """Return the 503 of a full queue. It carries no Retry-After."""
    text = "The engine is currently busy and cannot accept new requests. "
    text += "Please try again later or on a different instance."
    return error(503, "Service Unavailable", text)


def internal(message: str) -> Refusal:
    """Return a 500."""
    return error(500, "InternalServerError", message)


def engine_dead() -> Refusal:
    """Return the 500 of a server whose engine died."""
    return internal("The server had an error while processing your request.")


def detail(status: int, text: str) -> Refusal:
    """Return a refusal of the web framework itself, which knows no `error` object."""
    return Refusal(status, {"detail": text})


def unauthorized() -> Refusal:
    """Return the 401. Here `error` is a string."""
    return Refusal(401, {"error": "Unauthorized"})
