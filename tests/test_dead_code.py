"""Code that nothing uses: in the product, what only tests use counts as unused."""

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from vulture import Vulture

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("__init__.py", "client", "examples", "schemas", "server", "workers")

# What the product defines for others, by file.
PRODUCT_USED_ELSEWHERE = {
    # The client's users. Its heartbeat is a task that must not be collected.
    "__init__.py": "__dir__ __getattr__",
    "client/data.py": "from_chat",
    # Of the tokenizers library.
    "client/tokenizer.py": "post_processor",
    "client/rest.py": "get_sampler",
    "client/sampling.py": "compute_logprobs",
    "client/service.py": "_heartbeat create_full_training_client create_training_client_from_state",
    "client/trackers.py": "MlflowTracker TensorBoardTracker WandbTracker RunFollower follow",
    "client/training.py": "forward_backward_custom load_state_with_optimizer",
    # Fields of the wire that the SDK, the client's users or operators read.
    "schemas/checkpoints.py": "is_lora",
    "schemas/futures.py": "allow_metadata_only retrieved_request_ids response_payload_uncompressed_size",
    "schemas/models.py": """
        arch model_data is_lora sampleable queued_operations tokens_per_minute num_sequences
        num_references model_owner info_message warning_message
        proto_compress_fwdbwd parallel_fwdbwd_chunks sample_use_retrieve_futures custom_loss_server_side
        refresh_interval_sec sample_cancel_enabled runs_to_make_again org_details user_details jwt""",
    "schemas/sampling.py": "client_counter",
    # Read by templates.
    "server/console/operators.py": "num_sampling_jobs",
    # vLLM imports the first two by these names, and reads the others.
    "workers/engines/vllm/serve.py": "WeightsEndpoint __getattr__ model_weights _fused_kv_weight",
    # typer reads a command's signature and passes its flags by name.
    "server/cli/options.py": "__signature__",
    "server/cli/serve.py": "help_all",
    # Attributes, columns and overrides for uvicorn, sqlite3, SQLAlchemy, torch, tokenizers and transformers.
    "server/serving/connections.py": "timeout_keep_alive_task",
    "server/serving/server_process.py": "should_exit capture_signals",
    "server/store/sqlite.py": "isolation_level",
    "server/store/database/records.py": "last_heartbeat_at",
    "server/store/database/schema.py": "impl cache_ok load_dialect_impl process_bind_param process_result_value",
    "workers/drafts/model/draft_model.py": "grad_dtype",
    "workers/models/gguf.py": "pre_tokenizer",
    "workers/models/loading.py": "max_seq_len_cached original_max_seq_len",
    "workers/models/weights.py": "grad_dtype",
}
HTTP_SERVER = "do_GET do_POST log_message protocol_version"
# Attributes and overrides for http.server, uvicorn, tokenizers and torch.
TESTS_USED_ELSEWHERE = {
    "tests/docs/commands.py": "commenters whitespace whitespace_split",
    "tests/client/test_downloads.py": "do_GET do_HEAD log_message",
    "tests/client/test_retries.py": f"{HTTP_SERVER} close_connection daemon_threads",
    "tests/console/browser.py": "binary_location",
    "tests/server/console/test_pages.py": "handle_starttag",
    "tests/server/openai/test_prompts.py": "post_processor",
    "tests/server/hub.py": f"{HTTP_SERVER} do_HEAD do_PUT close_connection request_queue_size",
    "tests/workers/engines/vllm_models.py": "forward_cpu _run_in_subprocess",
    "tests/server/telemetry/collector.py": "do_POST log_message",
    "tests/workers/engines/vllm_stand_in.py": HTTP_SERVER,
    **dict.fromkeys(
        ("tests/acceptance/test_sampling_load.py", "tests/fuzz/serving.py", "tests/server/replication/test_standby.py"),
        "should_exit",
    ),
    "tests/server/serving/test_connections.py": "should_exit",
    "tests/schemas/test_rows.py": "post_processor",
    "tests/server/openai/test_ends.py": "post_processor",
    "tests/server/text/test_tokenizer.py": "post_processor",
    "tests/workers/drafts/case.py": "grad_dtype",
    "tests/workers/ops/test_attention.py": "grad_dtype",
}


class DeadCode(Vulture):
    """Counts a name as used if a string is that name, as those of workers' verbs, or ends in it after a colon, as those
    of workers' classes.
    """

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str) and (found := re.fullmatch(r"(?:[\w.]+:)?(\w+)", node.value)):
            self.used_names.add(found[1])

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yields file and name."""
        for item in self.get_unused_code(min_confidence=60):
            yield item.filename.relative_to(ROOT).as_posix(), item.name


PLANTED = """
planted_constant = 1
def planted_function(): ...
class PlantedWorker:
    def planted_method(self): ...
    def planted_verb(self): ...
call("planted:PlantedWorker", "planted_verb")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "paths", "used_elsewhere"),
    [("workers", PRODUCT, PRODUCT_USED_ELSEWHERE), ("tests", (*PRODUCT, "tests"), TESTS_USED_ELSEWHERE)],
    ids=["product", "tests"],
)
def test_no_code_is_dead(folder: str, paths: Sequence[str], used_elsewhere: Mapping[str, str]) -> None:
    dead = DeadCode(
        ignore_names=["pytestmark", "pytest_*", "anyio_backend"],
        ignore_decorators=["@router.*", "@app.*", "@model_validator", "@pytest.*"],
    )
    dead.scavenge([ROOT / path for path in paths], exclude=["*_pb2.py", "tests/test_dead_code.py"])
    unused = {(file, name) for file, name in dead.unused() if folder != "tests" or file.startswith("tests/")}
    assert unused == {(file, name) for file, names in used_elsewhere.items() for name in names.split()}
    dead.scan(PLANTED, ROOT / folder / "planted.py")
    planted = {name for file, name in dead.unused() if file == f"{folder}/planted.py"}
    assert planted == {"planted_constant", "planted_function", "planted_method"}
