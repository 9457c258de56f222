"""Prompt lengths: exact with the site's own vocabulary, or by class counts. The only user of tiktoken."""

from gateway.tokenizer.counting import count_text, measure
from gateway.tokenizer.estimator import PromptEstimator, open_estimator
from gateway.tokenizer.vocab import Vocabulary, build, load

__all__ = [
    "PromptEstimator",
    "Vocabulary",
    "build",
    "count_text",
    "load",
    "measure",
    "open_estimator",
]
