"""Requests, scheduler, runner, sampler, and the loop that joins them."""

from halfbyte.engine.core import EngineCore
from halfbyte.engine.llm import LLM, NewToken
from halfbyte.engine.outputs import CompletionOutput, Logprob, RequestOutput
from halfbyte.engine.request import FinishReason, Request
from halfbyte.engine.runner import ModelRunner
from halfbyte.engine.sampling_params import SamplingParams
from halfbyte.engine.scheduler import Scheduler

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineCore",
    "FinishReason",
    "Logprob",
    "ModelRunner",
    "NewToken",
    "Request",
    "RequestOutput",
    "SamplingParams",
    "Scheduler",
]
