"""`trainhouse plan --draft`: what each rank that trains drafts of a model holds. Loads no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import cast, get_args

from ...schemas.training import TargetRepr
from ...workers.planner.drafts.draft_estimate import LENGTH_STEP, longest_sequence
from ...workers.planner.drafts.draft_layouts import DraftLayout, heaviest
from ...workers.planner.drafts.draft_load import FIELDS, Algorithm, DraftLoad
from ...workers.planner.layout_search import usable_bytes
from ...workers.resources.machine import gigabytes
from ...workers.shapes.layouts.parameters import num_parameters
from ...workers.shapes.model_shape import ModelShape
from ..cli.output import aligned
from ..config.option_values import ConfigError, draft_fields

# Most of any field of a draft.
_MOST = 1 << 24

_OF_RANK = ("target", "policy", "rotations", "kv_cache", "target_pass", "exchange", "head", "sampling")
_OF_PASS = ("features", "kept", "working")


@dataclass(frozen=True)
class PlannedDraft:
    """The estimate for a draft. device_bytes, notes: see MemoryPlan."""

    shape: ModelShape
    layout: DraftLayout
    """The layout of the target on the ranks that train the draft, and of the draft."""
    draft: DraftLoad
    device_bytes: int | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        return None if self.device_bytes is None else self.layout.memory.total <= usable_bytes(self.device_bytes)

    @property
    def _most(self) -> int:
        return self.shape.max_positions or self.layout.load.longest

    @property
    def longest(self) -> int | None:
        """The tokens of the longest sequence that fits, of those that the model can run; None without a device."""
        if self.device_bytes is None:
            return None
        spec, load, draft_spec = self.layout.spec, self.layout.load, self.layout.draft_spec
        return longest_sequence(self.shape, spec, load, self.draft, draft_spec, self.device_bytes, self._most)

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.draft.shapes().values()))

    def as_json(self) -> dict[str, object]:
        layout, memory = self.layout, self.layout.memory
        of_rank, of_pass = ({name: getattr(memory, name) for name in names} for names in (_OF_RANK, _OF_PASS))
        return {
            "model": {"name": self.shape.name, "type": self.shape.model_type, "parameters": num_parameters(self.shape)},
            "draft": {"algorithm": self.draft.algorithm, "parameters": self.num_parameters}
            | {name: getattr(self.draft, name) for name in ("ttt_length", "block_size", "num_anchors")}
            | asdict(self.draft.sizes),
            "load": asdict(layout.load),
            "parallel": layout.spec.axes,
            "draft_parallel": layout.draft_spec.axes,
            "ranks": layout.spec.num_ranks,
            "memory": of_rank
            | {
                "draft": asdict(memory.vectors) | {"kept": memory.vectors.kept},
                "draft_pass": of_pass | {"total": memory.draft_pass},
                "least": memory.held,
                "total": memory.total,
            },
            "usable": None if self.device_bytes is None else usable_bytes(self.device_bytes),
            "fits": self.fits,
            "longest_sequence": self.longest,
            "captured_bytes": dict(self._captured),
            "notes": list(self.notes),
        }

    def text(self) -> Iterator[str]:
        shape, layout = self.shape, self.layout
        yield (
            f"{shape.name} ({shape.model_type}): {num_parameters(shape) / 1e9:.2f} billion parameters in "
            f"{layout.load.dtype}; draft: {self.draft.algorithm}, {self.num_parameters / 1e9:.2f} billion"
        )
        yield f"context: {layout.load.longest} tokens, in micro-batches of {layout.load.tokens}"
        ranks = f"{layout.spec.num_ranks} rank{'s' if layout.spec.num_ranks > 1 else ''}"
        yield f"layout: {layout.spec} for the target, {layout.draft_spec.axes} for the draft, {ranks}"
        if layout.load.activations != "keep":
            yield f"layers are recomputed in the backward pass: --activations {layout.load.activations}"
        yield from self.notes
        yield ""
        yield from aligned(("memory of each rank", "bytes", ""), [row for row in self._rows() if row[1] != "0 MB"])
        yield ""
        rows = [(name, str(num_bytes)) for name, num_bytes in self._captured.items()]
        yield from aligned(("captured features on disk", "bytes of a token"), rows)
        yield ""
        yield from self._verdict()

    @property
    def _captured(self) -> Mapping[str, int]:
        return self.draft.captured_bytes(self.layout.load.number_bytes)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        layout, memory, load = self.layout, self.layout.memory, self.layout.load
        vectors = memory.vectors
        num_shards = layout.draft_spec.num_ranks // layout.draft_spec.tp
        share = f"1/{num_shards}" if num_shards > 1 else "all"
        own_share = share if layout.spec.has_forward_collectives else "all"
        learned = f"an adapter of rank {load.lora_rank}" if load.training == "lora" else "all weights of a full model"
        yield "the target's base parameters", gigabytes(memory.target), ""
        yield "what the target has learned", gigabytes(memory.policy), learned
        yield "cosines and sines", gigabytes(memory.rotations), f"of {load.longest} positions"
        yield "key/value cache", gigabytes(memory.kv_cache), "" if load.samples else "sampling happens elsewhere"
        yield "the draft's weights", gigabytes(vectors.weights), f"{load.dtype}, of its part along tp"
        yield "its float32 weights", gigabytes(vectors.masters), share
        yield "its pending gradients", gigabytes(vectors.gradients), share
        yield "its moments", gigabytes(vectors.moments), share
        yield "gradients of an operation", gigabytes(vectors.scratch), f"while it runs, {own_share}"
        yield "the target's pass", gigabytes(memory.target_pass), "without a backward pass, with captured features"
        yield "features exchanged", gigabytes(memory.exchange), "after the target's pass"
        yield f"features of {memory.num_tokens} tokens", gigabytes(memory.features), "during the draft's pass"
        yield "the draft's pass", gigabytes(memory.kept), "kept for its backward pass"
        yield "logits or gradients", gigabytes(memory.working), "of a chunk, and of the draft's weights"
        yield "the output head gathered", gigabytes(memory.head), "during the draft's pass"
        yield "the model gathered to sample", gigabytes(memory.sampling), "when no pass runs"
        yield "at least, between passes", gigabytes(memory.held), ""
        yield "at most at a time", gigabytes(memory.total), ""

    def _verdict(self) -> Iterator[str]:
        if self.device_bytes is None:
            least, most = gigabytes(self.layout.memory.held), gigabytes(self.layout.memory.total)
            yield f"from {least} to {most} on each rank; --device-memory compares the latter with a device"
            return
        usable, room = usable_bytes(self.device_bytes), room_words(self.device_bytes)
        if self.fits:
            yield f"fits {room}: {gigabytes(usable - self.layout.memory.total)} to spare"
        else:
            more = gigabytes(self.layout.memory.total - usable)
            yield f"does not fit {room}: {more} too much; most is {heaviest(self.layout.memory)}"
        if self.longest:
            yield f"the longest sequence that fits: {self.longest} tokens"
        else:
            shortest = min(LENGTH_STEP, self._most)
            yield f"no sequence of {shortest} tokens fits: use more ranks along the target's fsdp, ep or tp"


def room_words(device_bytes: int) -> str:
    """Returns the memory of a device and what of it is not planned."""
    left = gigabytes(device_bytes - usable_bytes(device_bytes))
    return f"{gigabytes(device_bytes)}, of which {left} are left to CUDA and fragmentation"


@dataclass(frozen=True)
class DraftOptions:
    """The value of --draft. fields: see draft_load."""

    algorithm: Algorithm
    fields: Mapping[str, int]
    target_repr: TargetRepr = "hidden_state"


def parse_draft(text: str) -> DraftOptions:
    """Reads "eagle3,draft_vocab_size=32000,target_repr=logits". Raises ConfigError."""
    given = draft_fields(text, "--draft")
    wanted = given.pop("algorithm")
    if wanted not in ("eagle3", "dflash"):
        raise ConfigError(f"--draft is {wanted!r}: expected eagle3 or dflash, and fields such as eagle3,ttt_length=4")
    known, fields, target_repr = FIELDS[wanted], dict[str, int](), DraftOptions.target_repr
    for name, value in given.items():
        if name == "target_repr" and wanted == "eagle3":
            if value not in get_args(TargetRepr):
                raise ConfigError(f"--draft has target_repr {value!r}: expected {', '.join(get_args(TargetRepr))}")
            target_repr = cast(TargetRepr, value)
            continue
        if name not in known:
            raise ConfigError(f"--draft has no {name!r} for {wanted}: expected {', '.join(known)}")
        if name == "capture_layers" and all(layer.isascii() and layer.isdigit() for layer in value.split("+")):
            fields[name] = len(set(value.split("+")))
            continue
        if not (value.isascii() and value.isdigit()) or not 1 <= int(value) <= _MOST:
            raise ConfigError(f"--draft has {name} {value!r}: expected a whole number from 1 to {_MOST}")
        fields[name] = int(value)
    return DraftOptions(wanted, fields, target_repr)
