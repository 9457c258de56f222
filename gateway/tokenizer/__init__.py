"""How long a prompt is: the site's own vocabulary through tiktoken, or class counts. tiktoken's only home."""

from gateway.tokenizer.counting import Measurement, count_text, measure
from gateway.tokenizer.estimator import PromptEstimator, open_estimator
from gateway.tokenizer.vocab import BuildSummary, Vocabulary, build, load

__all__ = [
    "BuildSummary",
    "Measurement",
    "PromptEstimator",
    "Vocabulary",
    "build",
    "count_text",
    "load",
    "measure",
    "open_estimator",
]
