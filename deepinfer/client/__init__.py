"""The connection to an engine: rows become requests, tokens become answers, credits bound what is in flight."""

from deepinfer.client.connection import EngineClient, Job
from deepinfer.client.preparing import RequestMaker
from deepinfer.client.run import RowUpdate, Run

__all__ = ["EngineClient", "Job", "RequestMaker", "RowUpdate", "Run"]
