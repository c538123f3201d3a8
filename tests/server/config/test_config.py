"""Options: where their values are read, which values are refused, and that every option is used."""

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from trainhouse.schemas.models import DraftConfig
from trainhouse.server.config.load import load_config, load_section
from trainhouse.server.config.option_values import ConfigError, parse_bytes, parse_served_model
from trainhouse.server.config.server_config import OPTIONS, SECTIONS, ServerConfig
from trainhouse.server.files.storage_config import CheckpointStorageConfig
from trainhouse.server.store import StoreConfig
from trainhouse.workers.dispatch import DispatchConfig
from trainhouse.workers.protocol.parallel_spec import ParallelSpec
from trainhouse.workers.protocol.worker_config import RoleGroup, SamplingConfig, ServedModel, VllmConfig, WorkerConfig

ROOT = Path(__file__).resolve().parents[3]
MODEL = {"base_models": ["a/b"]}
CONFIGS = ROOT / "tests" / "workers" / "configs"


def config_of(**flags: str | list[str]) -> ServerConfig:
    return load_config({**MODEL, **flags}, {}, None)


def test_precedence_is_flag_environment_file_default(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("port = 1\nthreads = 1\nmax_lora_rank = 1\n")
    environment = {"TRAINHOUSE_PORT": "2", "TRAINHOUSE_THREADS": "2", "OTHER": "x"}
    config = load_config({**MODEL, "port": "3"}, environment, file)
    assert (config.network.port, config.ranks.threads, config.models.max_lora_rank, config.scheduler.pass_tokens) == (
        3,
        2,
        1,
        0,
    )


def test_shard_overrides_become_part_of_the_layout() -> None:
    config = config_of(parallel="fsdp=2,tp=2", shard="layers.*.self_attn.*=replicate")
    parallel = config.worker_config(config.models.base_models[0]).parallel
    assert str(parallel) == "fsdp=2,tp=2 (self_attn replicated)"
    assert (parallel.tp_size_of("self_attn"), parallel.tp_size_of("mlp")) == (1, 2)


def test_values_of_every_type_are_read_from_text_and_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(
        'base_models = ["a/b=/", "c"]\nstate_dir = "s"\nlong_poll_seconds = 3\nkv_cache_bytes = "2GiB"\n'
        'dtype = "float32"\nmax_context_length = 99\n'
    )
    environment = {
        "TRAINHOUSE_BASE_MODELS": "a/b=/, c",
        "TRAINHOUSE_STATE_DIR": "s",
        "TRAINHOUSE_LONG_POLL_SECONDS": "3",
        "TRAINHOUSE_KV_CACHE_BYTES": "2147483648",
        "TRAINHOUSE_DTYPE": "float32",
        "TRAINHOUSE_MAX_CONTEXT_LENGTH": "99",
    }
    assert load_config({}, {}, file) == load_config({}, environment, None)
    config = load_config({}, {}, file)
    assert config.models.base_models == (ServedModel("a/b", "/"), ServedModel("c", "c"))
    assert (config.store.state_dir, config.network.long_poll_seconds, config.models.max_context_length) == (
        Path("s"),
        3.0,
        99,
    )


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"port": "70000"}, "port is 70000: expected from 0 to 65535"),
        ({"port": "http"}, "--port is 'http': expected an integer"),
        ({"pool": "slurm"}, "pool is 'slurm': expected local or ray"),
        ({"zero_stage": "2"}, "zero_stage 2 has no effect without fsdp, and the layout is single: leave it out"),
        ({"shard": "lm_head*=replicate"}, "--shard: lm_head* matches no weights that ranks divide; those are layers"),
        (
            {"shard": "*=replicate", "parallel": "auto"},
            "--shard needs an explicit layout: set --parallel to one other than auto, or leave --shard out",
        ),
        ({"device": "gpu"}, "device is 'gpu': expected auto, cpu, cuda"),
        ({"max_lora_rank": "0"}, "max_lora_rank is 0: expected at least 1"),
        ({"max_full_models": "-1"}, "max_full_models is -1: expected at least 0"),
        ({"slice_milliseconds": "nan"}, "slice_milliseconds is nan: expected above 0"),
        ({"long_poll_seconds": "60"}, "long_poll_seconds is 60.0: expected from 0 to 44"),
        ({"max_body_bytes": "1TiB"}, "--max-body-bytes is '1TiB': expected a number of bytes, such as"),
        ({"max_body_bytes": "2GiB"}, "max_decompressed_bytes 1073741824 is below max_body_bytes 2147483648"),
        ({"max_body_bytes": "1GiB", "queued_bytes": "1GiB"}, "queued_bytes 1073741824 is below twice max_body_bytes"),
        ({"tenant_weights": "alice"}, "tenant weight 'alice' is not NAME=WEIGHT"),
        ({"tenant_weights": "alice=2,bob=0"}, "tenant weight 'bob=0' is not NAME=WEIGHT with a finite weight above 0"),
        ({"tenant_weights": "alice=nan"}, "tenant weight 'alice=nan' is not NAME=WEIGHT"),
        ({"tenant_weights": "alice=inf"}, "tenant weight 'alice=inf' is not NAME=WEIGHT with a finite weight above 0"),
        ({"tenant_weights": "=2"}, "tenant weight '=2' is not NAME=WEIGHT"),
        ({"tenant_weights": "alice=2,bob=1,alice=3"}, "tenant weights list alice twice, with 2 and 3: list it once"),
        ({"tenant_runs": "0"}, "tenant_runs is 0: expected at least 1"),
        ({"tenant_tokens_per_minute": "-1"}, "tenant_tokens_per_minute is -1: expected at least 0"),
        ({"ray_address": "auto"}, "ray_address has no effect with pool local: leave it out or set pool to ray"),
        ({"ray_cpus_per_rank": "1"}, "ray_cpus_per_rank has no effect with pool local"),
        (
            {"pool": "ray", "device": "cpu", "ray_gpus_per_rank": "1"},
            "ray_gpus_per_rank has no effect with device cpu: leave it out or change device",
        ),
        ({"sampler": "sglang"}, "sampler is 'sglang': expected native or vllm"),
        ({"sampler": "vllm"}, "sampler vllm needs either vllm_url (of a running vLLM) or vllm_python"),
        ({"sampler": "vllm", "vllm_url": "http://a", "vllm_python": "/bin/sh"}, "and has both"),
        ({"sampler": "vllm", "vllm_python": "/no/such"}, "vllm_python: there is no file /no/such"),
        ({"sampler": "vllm", "vllm_url": "a:8000"}, "vllm_url is 'a:8000': expected http://HOST:PORT"),
        ({"sampler": "vllm", "vllm_url": "http://a,http://b"}, "vllm_url names 2 servers for 1 base models"),
        (
            {"sampler": "vllm", "vllm_url": "http://a", "vllm_draft": "eagle3"},
            "vllm_draft is for a vLLM that the server starts: leave it out",
        ),
        ({"vllm_draft": "eagle3"}, "vllm_draft has no effect with sampler native"),
        (
            {"sampler": "vllm", "vllm_python": "/bin/sh", "vllm_draft": "eagle3,layers=2"},
            "expected eagle3 or dflash, and fields of `draft`, such as eagle3,draft_vocab_size=32000",
        ),
        (
            {"sampler": "vllm", "vllm_python": "/bin/sh", "vllm_draft": '{"algorithm": "eagle3", "block_size": 8}'},
            '"block_size": 8}\': write it without JSON, such as eagle3,draft_vocab_size=32000',
        ),
        (
            {"sampler": "vllm", "vllm_python": "/bin/sh", "vllm_draft": "dflash,block_size=8,block_size=9"},
            "has block_size twice, '8' and '9': give it once",
        ),
        (
            {"sampler": "vllm", "vllm_python": "/bin/sh", "vllm_draft": "eagle3,algorithm=dflash"},
            "write the algorithm alone, at the front, such as eagle3",
        ),
        (
            {"sampler": "vllm", "vllm_python": "/bin/sh", "vllm_draft_tokens": "4"},
            "vllm_draft_tokens has no effect without vllm_draft: leave it out",
        ),
        ({"vllm_url": "http://a"}, "vllm_url has no effect with sampler native: leave it out or set sampler to vllm"),
        (
            {"sampler": "vllm", "vllm_url": "http://a", "sampler_workers": "1"},
            "sampler_workers has no effect with sampler vllm",
        ),
        (
            {"sampler_workers": "2", "sampler_device": "cpu,cpu,cpu"},
            "3 devices for 2 sampler_workers: name one for all",
        ),
        ({"sampler_device": "cpu"}, "sampler_device has no effect without sampler_workers"),
        ({"sampler_parallel": "tp=2"}, "sampler_parallel has no effect without sampler_workers: leave it out or set"),
        (
            {"sampler": "vllm", "vllm_url": "http://a", "sampler_parallel": "tp=2"},
            "sampler_parallel has no effect with sampler vllm: leave it out; vllm_tp sets how many GPUs share",
        ),
        ({"sampler_parallel": "auto"}, "sampler_parallel has no effect without sampler_workers: leave it out or set"),
        ({"device_link": "infiniband"}, "device_link is 'infiniband': expected auto or nvlink or pcie or host"),
        ({"draft_parallel": "tp"}, "--draft-parallel: tp= is not a number of ranks; give one such as tp=2"),
        (
            {"sampler_workers": "1", "sampler_parallel": "tp"},
            "--sampler-parallel: tp= is not a number of ranks; give one",
        ),
        (
            {"sampler_workers": "1", "sampler_parallel": "tp=2,fsdp=2"},
            "sampler_parallel fsdp=2,tp=2: fsdp ranks gather all layers to sample, which takes the memory that",
        ),
        (
            {"sampler_workers": "1", "sampler_parallel": "sp=2"},
            "sampler_parallel sp=2: sp ranks hold all layers and sample separately",
        ),
        (
            {"sampler_workers": "3", "sampler_parallel": "replicas=2,tp=2"},
            "sampler_parallel replicas=2,tp=2: replicas would wait for each other's samples: raise sampler_workers",
        ),
        ({"role_groups": "critic"}, "role group 'critic' is not ROLES=LAYOUT[@DEVICE], such as reference=single or"),
        ({"role_groups": "critic=tp=2@"}, "role group 'critic=tp=2@' is not ROLES=LAYOUT[@DEVICE]"),
        (
            {"role_groups": "policy=tp=2"},
            "policy=tp=2: policies always run in the base model's own group, with the layout of --parallel and the "
            "device of --device: name critic or reference",
        ),
        ({"role_groups": "judge=single"}, "judge=single: unknown role 'judge': expected critic or reference"),
        ({"role_groups": "critic+=single"}, "critic+=single: unknown role '': expected critic or reference"),
        ({"role_groups": "critic+critic=single"}, "critic+critic=single: critic already has a group: name it once"),
        (
            {"role_groups": ["critic=single", "reference+critic=tp=2"]},
            "reference+critic=tp=2: critic already has a group: name it once",
        ),
        ({"role_groups": "critic=pp=2"}, "role group 'critic=pp=2': pipeline parallelism is not offered"),
        ({"role_groups": "critic=auto"}, "role group 'critic=auto': only --parallel can be auto: name a layout"),
        ({"role_groups": "critic=single@gpu"}, "critic=single@gpu is at gpu: expected auto, cpu, cuda"),
        (
            {"role_groups": "critic=single@cuda:1,cuda:2"},
            "critic=single@cuda:1,cuda:2 names 2 devices for 1 base models: name one for all, or one for each",
        ),
        ({"base_models": "=x"}, "base model '=x' is not NAME[=PATH_OR_HUB_ID]"),
        ({"base_models": "a="}, "base model 'a=' is not NAME[=PATH_OR_HUB_ID]"),
        ({"base_models": "a=/no/such/place"}, "base model a: there is no /no/such/place"),
    ],
)
def test_bad_values_are_refused_with_the_value_and_the_remedy(flags: dict[str, str | list[str]], reason: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        config_of(**flags)
    assert reason in str(refusal.value)


def test_a_server_needs_a_base_model() -> None:
    with pytest.raises(ConfigError, match="--base-model is not given: expected at least one"):
        load_config({}, {}, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "unknown key 'prot': did you mean port?"),
        ("zzz = 1", "unknown key 'zzz': see `trainhouse serve --help-all`"),
        ("port = 1.5", "port in .* is 1.5: expected an integer"),
        ("port = true", "port in .* is True: expected an integer"),
        ("port = [1]", r"port in .* is \[1\]: expected an integer"),
        ('port = ["1"]', r"port in .* is \['1'\]: expected an integer"),
        ("pool = 3", "pool in .* is 3: expected a string"),
        ("port = ", "is not valid TOML"),
    ],
)
def test_mistakes_in_the_file_are_named(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        load_config(MODEL, {}, file)


def test_keys_of_the_file_may_be_in_the_tables_of_their_sections(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("threads = 3\n[network]\nport = 1\n[limits]\nmax_body_bytes = '1MiB'\n")
    assert load_config(MODEL, {}, file) == config_of(threads="3", port="1", max_body_bytes="1MiB")
    for text, reason in (
        ("[network]\nprot = 1", "unknown key 'prot': did you mean port?"),
        ("[network]\nthreads = 1", r"has threads in \[network\]: move it to \[ranks\]"),
        ("[netwrok]\nport = 1", "unknown key 'netwrok'"),
        ("mirrors = 3", "mirrors in .* is 3: expected a string, or a list of strings"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=reason):
            load_config(MODEL, {}, file)


def test_a_missing_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"/no/such\.toml cannot be read: No such file"):
        load_config(MODEL, {}, Path("/no/such.toml"))


def test_misspelt_environment_variables_are_refused_and_foreign_ones_ignored() -> None:
    foreign = {
        "TRAINHOUSE_API_KEY": "tml-x",
        "TRAINHOUSE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "TRAINHOUSE_CONFIG": "",
    }
    assert load_config(MODEL, foreign, None) == config_of()
    with pytest.raises(ConfigError, match="TRAINHOUSE_MAX_LORA_RANKS: did you mean TRAINHOUSE_MAX_LORA_RANK"):
        load_config(MODEL, {"TRAINHOUSE_MAX_LORA_RANKS": "3"}, None)


def test_sizes_may_have_a_unit() -> None:
    assert [parse_bytes(text) for text in ("7", "1KiB", "1.5MiB", "2 GiB", "1MB")] == [
        7,
        1024,
        3 << 19,
        2 << 30,
        10**6,
    ]
    for text in ("", "1.5", "-1", "1TiB", "x"):
        with pytest.raises(ValueError):
            parse_bytes(text)


def test_a_base_model_name_can_be_an_alias_of_a_path() -> None:
    assert parse_served_model("Qwen/Qwen3-8B=~/models") == ServedModel("Qwen/Qwen3-8B", str(Path.home() / "models"))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_only_loopback_addresses_count_as_loopback(host: str, loopback: bool) -> None:
    assert config_of(host=host).is_loopback is loopback


def test_workers_and_dispatch_receive_their_options() -> None:
    of_workers = {"threads": "3", "kv_cache_bytes": "5", "full_slots": "3", "max_full_models": "0"}
    config = load_config({"base_models": ["a", "b"], "pool": "ray", "ray_address": "auto", **of_workers}, {}, None)
    dispatch = config.dispatch_config()
    assert isinstance(dispatch, DispatchConfig)
    assert (dispatch.pool, dispatch.ray_address) == ("ray", "auto")
    assert [model.model.name for model in dispatch.models] == ["a", "b"]
    for model in dispatch.models:
        assert (model.threads, model.kv_cache_bytes, model.full_slots, model.max_full_models) == (3, 5, 3, 0)


def test_tenant_weights_and_the_page_directory_reach_the_dispatch(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('tenant_weights = ["alice=2", "bob = 0.5"]\npass_tokens = 100\nadapter_slots = 3\n')
    config = load_config({**MODEL, "state_dir": str(tmp_path)}, {}, file)
    assert config.scheduler.tenant_weights == config_of(tenant_weights="alice=2,bob=0.5").scheduler.tenant_weights
    dispatch = config.dispatch_config()
    assert (dispatch.tenant_weights, dispatch.pass_tokens) == ({"alice": 2.0, "bob": 0.5}, 100)
    assert dispatch.models[0].adapter_slots == 3
    assert dispatch.models[0].page_directory == str(tmp_path / "pages")
    assert config_of(pool="ray").dispatch_config().models[0].page_directory is None


def test_role_groups_are_read_from_all_sources_and_printed_as_written(tmp_path: Path) -> None:
    written = ["critic=fsdp=2,tp=2@cuda:1,cuda:5", "reference=single"]
    file = tmp_path / "server.toml"
    file.write_text(f"role_groups = {written}\n")
    models = {"base_models": ["a=/", "b=/"]}
    of_flags = load_config({**models, "role_groups": written}, {}, None).ranks.role_groups
    assert of_flags == load_config(models, {"TRAINHOUSE_ROLE_GROUPS": "; ".join(written)}, None).ranks.role_groups
    assert of_flags == load_config(models, {}, file).ranks.role_groups
    assert of_flags == (
        RoleGroup(("critic",), ParallelSpec(fsdp=2, tp=2), ("cuda:1", "cuda:5")),
        RoleGroup(("reference",)),
    )
    assert [str(each) for each in of_flags] == written
    config_of(zero_stage="2", role_groups=["critic=fsdp=2"])


@pytest.mark.parametrize("secret", ["vllm_api_key", "database_url"])
def test_messages_do_not_show_secrets(secret: str, tmp_path: Path) -> None:
    (file := tmp_path / "server.toml").write_text(f'base_models = ["a=/"]\n{secret} = 12345678\n')
    with pytest.raises(ConfigError, match=f"{secret}.* is malformed") as refused:
        load_config({}, {}, file)
    assert "12345678" not in str(refused.value)


def test_sampling_options_reach_the_dispatch(tmp_path: Path) -> None:
    devices = {"sampler_workers": "2", "sampler_device": "cuda:1,cuda:3"}
    workers = config_of(**devices, sampler_parallel="ep=2,tp=2", state_dir=str(tmp_path))
    assert workers.dispatch_config().sampling == SamplingConfig(
        2, ParallelSpec(ep=2, tp=2), devices=("cuda:1", "cuda:3"), directory=str(tmp_path / "samplers")
    )
    assert config_of(sampler_workers="1").dispatch_config().sampling.parallel == ParallelSpec()
    flags = {"vllm_url": "http://a:1/x", "vllm_api_key": "key", "vllm_dtype": "bfloat16", "vllm_memory_share": "0.5"}
    vllm = config_of(sampler="vllm", vllm_tp="2", **flags).dispatch_config().sampling.vllm
    assert vllm == VllmConfig(("http://a:1/x",), "key", None, "bfloat16", 0.5, 2)
    own = load_config({**MODEL, "sampler": "vllm"}, {"TRAINHOUSE_VLLM_PYTHON": "/bin/sh"}, None)
    assert own.dispatch_config().sampling.vllm == VllmConfig(python="/bin/sh")
    for draft, shape in (
        ("dflash", DraftConfig(algorithm="dflash")),
        ("eagle3,draft_vocab_size=300", DraftConfig(algorithm="eagle3", draft_vocab_size=300)),
        ("eagle3,capture_layers=1+14", DraftConfig(algorithm="eagle3", capture_layers=(1, 14))),
        ("dflash,capture_layers=3,block_size=8", DraftConfig(algorithm="dflash", capture_layers=(3,), block_size=8)),
    ):
        drafted = config_of(sampler="vllm", vllm_python="/bin/sh", vllm_draft=draft, vllm_draft_tokens="6")
        vllm = drafted.dispatch_config().sampling.vllm
        assert vllm is not None and vllm.draft is not None
        assert (vllm.draft.model_dump(), vllm.draft_tokens) == (shape.model_dump(), 6)


def test_checkpoint_places_and_several_mirrors_are_read(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('checkpoints = "file:///c"\nmirrors = ["file:///a", "file:///b"]\ncheckpoint_cache_bytes = "1MiB"')
    environment = {"TRAINHOUSE_CHECKPOINTS": "file:///c", "TRAINHOUSE_MIRRORS": "file:///a, file:///b"}
    flags = {"mirrors": ["file:///a", "file:///b"], "checkpoints": "file:///c"}
    given = [load_config(MODEL, {}, file), load_config(MODEL, environment, None), load_config(MODEL | flags, {}, None)]
    assert {(config.storage_config().checkpoints, config.storage_config().mirrors) for config in given} == {
        ("file:///c", ("file:///a", "file:///b"))
    }
    assert given[0].storage_config().checkpoint_cache_bytes == 1 << 20
    assert config_of().storage_config() == CheckpointStorageConfig()
    for place in ("checkpoints", "mirrors"):
        with pytest.raises(ConfigError, match="fsspec does not support nofs://"):
            config_of(**{place: "nofs://b"})
        with pytest.raises(ConfigError, match="memory://b is the memory of this process"):
            config_of(**{place: "memory://b"})


def test_tenant_weights_accept_any_python_number() -> None:
    config = config_of(tenant_weights="a=1e2, b=.5, c=+3, d=2.")
    assert [weight.weight for weight in config.scheduler.tenant_weights] == [100.0, 0.5, 3.0, 2.0]


def test_the_store_config_needs_no_base_model() -> None:
    assert load_section(StoreConfig, {}, {}, None) == StoreConfig(Path(".trainhouse"))
    assert load_section(StoreConfig, {}, {"TRAINHOUSE_STATE_DIR": "x"}, None) == StoreConfig(Path("x"))
    given = {"database_url": "postgresql://h/d", "durability": "power"}
    assert load_section(StoreConfig, given, {}, None) == StoreConfig(Path(".trainhouse"), "postgresql://h/d", "power")
    with pytest.raises(ConfigError, match="durability is 'disk'"):
        load_section(StoreConfig, {"durability": "disk"}, {}, None)


@pytest.mark.parametrize(
    "url", ["mysql://me:geheim@h/d", "postgresql://", "me:geheim@h", "postgresql+asyncpg://me:geheim@h"]
)
def test_a_database_url_is_checked_and_never_shown(url: str) -> None:
    with pytest.raises(ConfigError, match=r"database_url is malformed: expected postgresql") as refused:
        config_of(database_url=url)
    assert "geheim" not in str(refused.value)
    assert "geheim" not in repr(config_of(database_url="postgresql://me:geheim@h/d"))


def test_advertise_url_and_lease_seconds_are_checked() -> None:
    shared = {"database_url": "postgresql://h/d"}
    for url in ("http://a:8000", "https://trainhouse.example", "http://[::1]:8000/"):
        assert config_of(advertise_url=url, **shared).store.advertise_url == url
    for url in ("a:8000", "http://a:8000/api", "ftp://a", "http://"):
        with pytest.raises(ConfigError, match=r"advertise_url is .* expected http://HOST:PORT"):
            config_of(advertise_url=url, **shared)
    with pytest.raises(ConfigError, match="advertise_url has no effect without database_url"):
        config_of(advertise_url="http://a:8000")
    with pytest.raises(ConfigError, match=r"lease_seconds is 0\.5: expected above 0\.5"):
        config_of(lease_seconds="0.5", **shared)


def test_the_example_configuration_is_valid() -> None:
    file = ROOT / "deploy" / "example.toml"
    with pytest.raises(ConfigError, match=r"there is no /models/Qwen3-0\.6B"):
        load_config({}, {}, file)
    assert load_config(MODEL, {}, file).ranks.pool == "local"


# Every option is read


def attributes_of_configs(package: str) -> Iterator[str]:
    """Yields the x of every `config.x` or `section.x`, and of `model.x`, as the dispatch calls a WorkerConfig."""
    for path in (ROOT / package).rglob("*.py"):
        if path.parent == ROOT / "server" / "config":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value
                name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                if "config" in name or name in ("model", "vllm", *SECTIONS):
                    yield node.attr


OF_PLUGINS = {"server/openai": ("max_logprobs",), "server/replication": ("advertise_url", "lease_seconds")}
"""Options that only the code of a plugin reads from the config, by its folder."""


def test_every_option_is_read() -> None:
    handed_on = {entry.name for target in (WorkerConfig, DispatchConfig) for entry in fields(target)}
    read_in_server, read_in_workers = set(attributes_of_configs("server")), set(attributes_of_configs("workers"))
    unread = {
        name
        for name in OPTIONS
        if name not in (read_in_workers if name in handed_on else read_in_server)
        and not name.startswith(("sampler", "vllm_"))
    }
    of_missing = {name for folder, names in OF_PLUGINS.items() if not (ROOT / folder).exists() for name in names}
    assert unread == of_missing
    # Options of sampling have other names in SamplingConfig and VllmConfig.
    assert {entry.name for target in (SamplingConfig, VllmConfig) for entry in fields(target)} <= read_in_workers
    assert "no_such_option" not in read_in_server | read_in_workers


def test_every_option_has_help_and_a_default_that_passes_its_check() -> None:
    defaults = config_of()
    for name, option in OPTIONS.items():
        assert option.help
        if name != "base_models":
            assert defaults.value(name) == option.checked(option.default)


def test_each_base_model_can_have_its_own_device() -> None:
    models = {"TRAINHOUSE_BASE_MODELS": "a=/,b=/"}
    config = load_config({"device": "cpu,cuda:1"}, models, None)
    assert [model.device for model in config.dispatch_config().models] == ["cpu", "cuda:1"]
    shared = load_config({"device": "cuda:1"}, models, None)
    assert [model.device for model in shared.dispatch_config().models] == ["cuda:1", "cuda:1"]
    with pytest.raises(ConfigError, match="device names 3 devices for 2 base models"):
        load_config({"device": "cpu,cpu,cpu"}, models, None)
