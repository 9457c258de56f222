"""The operator's rules for request bodies."""

from gateway.core.errors import InvalidRequest
from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class WireRules:
    """The operator's rules for request bodies.

    Attributes:
        choices_max: Maximum choices (`n` times prompts) of a request.
        messages_max: Maximum messages, parts and tool calls of a message, and prompts, each; limits the work
            per item.
        parts_max: Maximum parts and tool calls of all messages together.
        tools_max: Maximum tools.
        token_ids_max: Maximum tokens of a prompt given as ids.
        remote_media: Whether images and audio may be URLs, which the backend fetches.
        drop_fields: Members to remove because they give access to engine internals; from
            `chat_template_kwargs`, too.
        usage_in_streams: Whether to ask backends for a usage event in every stream.
    """

    choices_max: int = 16
    messages_max: int = 4_096
    parts_max: int = 16_384
    tools_max: int = 1_024
    token_ids_max: int = 1_048_576
    remote_media: bool = False
    drop_fields: frozenset[str] = frozenset()
    usage_in_streams: bool = True

    def check_choices(self, choices: int) -> None:
        """Reject more choices than a request may ask for.

        Raises:
            InvalidRequest: these are more.
        """
        if choices > self.choices_max:
            message = f"At most {self.choices_max} choices per request."
            raise InvalidRequest(message, code="too_many_choices", param="n")
