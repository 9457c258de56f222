"""What the tests of a simulated engine's wire share: sample members, and answers without their ids."""

import re

import httpx

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
IMAGE = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": "data:,"}}]


def masked(body: str) -> str:
    """Return a body without what differs from answer to answer."""
    body = re.sub(r'"id":"(chatcmpl|cmpl|modelperm)-[0-9a-f]{16}"', r'"id":"\1-ID"', body)
    body = re.sub(r'"(chatcmpl-tool)-[0-9a-f]{16}"', r'"\1-ID"', body)
    body = re.sub(r'"created":\d{10}', '"created":0', body)
    return re.sub(r'"vllm-0.33.0-[0-9a-f]{8}"', '"FP"', body)


async def post(client: httpx.AsyncClient, body: object, path: str = "/v1/chat/completions") -> httpx.Response:
    return await client.post(path, json=body)
