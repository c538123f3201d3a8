"""The Python client, which needs only httpx, pydantic, numpy and protobuf.

It sends batches; splitting them into micro-batches and over ranks is the server's task.
"""

from ..schemas.sampling import ModelInput as ModelInput
from ..schemas.sampling import SampledSequence as SampledSequence
from ..schemas.sampling import SampleResponse as SampleResponse
from ..schemas.sampling import SamplingParams as SamplingParams
from ..schemas.schedules import CheckpointSchedule as CheckpointSchedule
from ..schemas.training import AdamParams as AdamParams
from ..schemas.training import ForwardBackwardOutput as ForwardBackwardOutput
from ..schemas.training import ProvenanceSpan as ProvenanceSpan
from .data import CapturedData as CapturedData
from .data import Datum as Datum
from .errors import *  # noqa: F403
from .futures import APIFuture as APIFuture
from .rest import RestClient as RestClient
from .sampling import SamplingClient as SamplingClient
from .service import ServiceClient as ServiceClient
from .training import TrainingClient as TrainingClient
