"""Prompt lengths: exact with the site's own vocabulary, or by class counts. The only user of tiktoken."""

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
