"""What is known to go wrong on a deployment, by name: the names in `Profile.quirks`."""

from collections.abc import Mapping

QUIRKS: Mapping[str, str] = {
    "acceptance_drops_silently": "EAGLE3 with TP=2 can lose draft acceptance without an error (vLLM #50158).",
    "context_2k_stall": "Contexts around 2,048 tokens stalled for 132 s at 256 users (TPU-S).",
    "full_context_every_layer": "Sliding-window KV is off: every layer keeps the whole context.",
    "images_may_oom": "Images can run out of memory at utilisation 0.94; serve them at 0.92 or less.",
    "kv_over_reported": "The engine may report more KV than it has and run out under load (vLLM #50159).",
    "long_prefill_stalls": "A long prefill stalls every stream on the server for the length of its chunk.",
    "max_completion_tokens_ignored": "`max_completion_tokens` is ignored; `max_tokens` is not.",
    "no_reasoning_parser": "The recipe sets no reasoning parser: thoughts arrive inside the content.",
    "null_reasoning_content": "`reasoning_content` is always null (vLLM #38855).",
    "nvfp4_load_fails": "NVFP4 checkpoints fail to load on vLLM 0.23.1rc1 and 0.24.0 (#45543, #48238).",
    "one_model_at_a_time": "Two models share the box, one resident at a time; a change is a cold boot.",
    "overlong_prompt_deadlock": "One token over the window can deadlock the scheduler (vLLM #42381, 0.20.1).",
    "oversized_kv_deadlock": "A request within the window but over the KV pool hangs it (vLLM #39734).",
    "slow_decode": "One stream makes 6 to 11 tokens/s: 4,000 tokens outlast common client timeouts.",
    "stale_chat_template": "Quantised builds may carry an old chat template that leaks channel markers.",
    "streamed_tool_json_invalid": "Streamed tool arguments can be invalid JSON (vLLM #38946).",
    "text_only": "Started with --language-model-only: images and audio are refused.",
    "thinking_default_differs": "Template and parser disagree on whether to think unasked (vLLM #49955).",
    "token_buckets_256": "Request sizes are padded to buckets of 256 tokens.",
    "tool_choice_not_enforced": "`tool_choice: required` may return prose (vLLM #50477).",
    "tool_markup_leaks": "Non-streamed multi-turn tool use can leak tags or stop early (vLLM #39043).",
    "turn_marker_leaks": "Streams can end with a stray `<turn|>` (vLLM #49955, 0.25.1 and 0.26.0).",
    "unmeasured_batches": "Only one stream, or no decode rate at all, is published: figures are guesses.",
}
"""Quirk name -> one sentence."""
