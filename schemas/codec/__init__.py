"""Encodes and decodes the types of this package: protobuf, JSON and zstd. No other module handles wire formats.

Invalid input from a client raises RequestError with a reason; invalid input from a server (the decoders for our client)
raises ValueError. Decoded arrays are C-contiguous, writable and of the dtypes that the types promise.
"""

from .compression import decompress, decompressed_size
from .formats import (
    JSON,
    PROTOBUF,
    check_json_size,
    check_json_text,
    decode_model,
    describe_errors,
    format_of,
    parse_json,
    refused_with_400,
)
from .outputs import (
    decode_forward_backward_output,
    encode_forward_backward_output,
    encode_forward_backward_output_json,
    forward_backward_output_json_pieces,
)
from .peek import PeekedOperation, peek_operation
from .requests import decode_forward_backward, encode_forward_backward_request
from .samples import (
    decode_sample_response,
    dense_target_bytes,
    encode_sample_response,
    encode_sample_response_json,
    sample_response_json_pieces,
)
from .tensors import MAX_DENSE_BYTES, CsrLayout, csr_layout_from_json, tensor_from_json, tensor_to_json
from .values import JsonObject

__all__ = [
    "JSON",
    "MAX_DENSE_BYTES",
    "PROTOBUF",
    "CsrLayout",
    "JsonObject",
    "PeekedOperation",
    "check_json_size",
    "check_json_text",
    "csr_layout_from_json",
    "decode_forward_backward",
    "decode_forward_backward_output",
    "decode_model",
    "decode_sample_response",
    "decompress",
    "decompressed_size",
    "dense_target_bytes",
    "describe_errors",
    "encode_forward_backward_output",
    "encode_forward_backward_output_json",
    "encode_forward_backward_request",
    "encode_sample_response",
    "encode_sample_response_json",
    "format_of",
    "forward_backward_output_json_pieces",
    "parse_json",
    "peek_operation",
    "refused_with_400",
    "sample_response_json_pieces",
    "tensor_from_json",
    "tensor_to_json",
]
