"""Writes docs/models.md from the code: what is done with each type of model that transformers has, and layouts of
models that the hosted service serves, and others. `make models` calls it.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from pkgutil import iter_modules
from tempfile import TemporaryDirectory
from typing import Any

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from ..schemas.adapters.vllm_form import FORMS
from ..server.cli.commands import main
from ..workers.shapes import families
from ..workers.shapes.families import DECLARED, FAMILIES, Family
from ..workers.shapes.model_shape import ModelShape, describe_model, refusal_of
from ..workers.shapes.other_models import BY_TRANSFORMERS, TEXT_PARTS
from ..workers.shapes.parts import Dense, GatedDelta, LatentAttention, Mamba, Part, RoutedExperts, SoftmaxAttention
from .tiny import tiny_config
from .workers.lineup import LINEUP, REFUSED_LINEUP
from .workers.models.tiny_types import NEEDED_SETTINGS, default_config
from .workers.parallel.test_families import MATRIX

# The types that generate text, from text alone or with images and sound.
KNOWN = {
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
}
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "models.md"
CONFIGS = Path(__file__).parent / "workers" / "configs"
DEVICES, MEMORIES = (1, 8, 16, 64), ("80GB", "141GB")
TOKENS = 32768
# Of classes that have another name in transformers, and of types whose releases name a class that it does not have.
NAMES_IN_RELEASES = {
    "exaone": "ExaoneForCausalLM",
    "sarvam_mla": "SarvamMLAForCausalLM",
    "sarvam_moe": "SarvamMoEForCausalLM",
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "PhimoeForCausalLM": "PhiMoEForCausalLM",
}
# Types without experts whose text part is of a type that may have some.
DENSE = ("gemma4_unified",)

WORDS: Mapping[type[Part], str] = {
    SoftmaxAttention: "attention",
    LatentAttention: "latent attention",
    GatedDelta: "gated delta rule",
    Mamba: "Mamba-2",
    Dense: "dense",
    RoutedExperts: "experts",
}

REFERENCE = "; docs/models.md lists the models that are served"

INTRODUCTION = """\
# Models

`make models` writes the tables of this file from the code; a test compares them.

Of the {total} types of models for text, and for text with images or sound, that transformers {version} has, {own} run
by trainhouse's own layers, {others} by transformers' modules, and {refused} are refused. `trainhouse plan` and `serve`
decide by the same function. [support.md](support.md) says what else a model needs. `exaone`, `sarvam_mla` and
`sarvam_moe` need transformers 5.24: with 5.23 they are planned, and do not load.
"""
OWN = """
## Types under every layout

Layers are those of the type's default config, to which fields are added where transformers makes no model of it:
{undefined}. Adapters adapt
the linear layers named here: with `train_attn` those of the sequence mixer, with `train_mlp` those of the feed-forward
part; all linear layers of every expert (`experts.*`), but no router. The last columns say under which layouts a tiny
model of the type was [checked](#families-of-models), and which of these layers vLLM 0.32 adapts too
([`--sampler vllm`](samplers.md#vllm)).

| type | layers | adapted linear layers | axes, in addition to `replicas` and `fsdp` | checked | adapted in vLLM |
|---|---|---|---|---|---|
"""
OTHERS = """
## Types on one rank or replicas

They run by transformers' modules. `get_info` says what an adapter adapts.

"""
REFUSED = """
## Refused types

| reason | types |
|---|---|
"""
PLANNED = """
## Layouts of models of the hosted service, and others

Planned, not run: `trainhouse plan --parallel auto` for sequences of {tokens} tokens (`--max-context-length`), with one
adapter of rank 32 and a base model in bfloat16. A cell has the layout that fills the devices, and GB on each rank;
`recompute` and `offload` are values of `--activations`. Where no layout fits, it has the one that needs least, and of
models that are refused the reason. The ranks train and sample, over NVLink. Sizes of Nemotron-3-Ultra's experts follow
from its published totals.

| model | memory | {devices} |
|---|---|{columns}
"""
OF_FAMILIES = """
## Families of models

The files in `workers/shapes/families/`, which declare the layers of types.

| types | family |
|---|---|
"""
BY_HAND = '\n"Checked" means: '


def document() -> str:
    """Returns the text of docs/models.md: what the code says, and then what is written by hand."""
    own, others, refused = by_decision()
    counts = {"own": len(own), "others": len(others), "refused": len(refused)}
    introduction = INTRODUCTION.format(total=sum(counts.values()), version=transformers_version(), **counts)
    devices = " | ".join("1 device" if number == 1 else f"{number} devices" for number in DEVICES)
    planned = PLANNED.format(tokens=TOKENS, devices=devices, columns="---|" * len(DEVICES))
    rows = (own_row(each) for each in own)
    names = ", ".join(f"`{each}`" for each in others) + ".\n"
    titles = OWN.format(undefined=names_of(sorted(NEEDED_SETTINGS)))
    tables = [introduction, titles, *rows, OTHERS, names, REFUSED, *refused_rows(refused), planned, *plan_rows()]
    tables += [OF_FAMILIES, *family_rows()]
    _, heading, by_hand = DOCUMENT.read_text().partition(BY_HAND)
    return "".join([*tables, heading, by_hand])


def transformers_version() -> str:
    import transformers

    return ".".join(transformers.__version__.split(".")[:2])


def by_decision() -> tuple[list[str], list[str], dict[str, str]]:
    """Returns the types that run by our own layers, by transformers' modules, and reasons of refused ones by type."""
    served = {*FAMILIES, *TEXT_PARTS, *BY_TRANSFORMERS}
    reasons = {each: str(refusal_of(default_config(each))) for each in sorted(KNOWN - served)}
    return sorted({*FAMILIES, *TEXT_PARTS}), sorted(BY_TRANSFORMERS), reasons


def own_row(model_type: str) -> str:
    shape = describe_model(model_type, default_config(model_type))
    assert isinstance(shape, ModelShape), shape.refusal
    text = f", its text as `{shape.model_type}`" if model_type in TEXT_PARTS else ""
    parts = list(dict.fromkeys(part for layer in shape.layers for part in layer.parts))
    words = ", ".join(dict.fromkeys(map(words_of, parts)))
    cells = (words, names_of(adapted(parts)), names_of(axes(shape)), checked(shape.model_type, model_type not in DENSE))
    cells += (adapted_by_vllm(model_type),)
    return f"| `{model_type}`{text} | {' | '.join(cells)} |\n"


def words_of(part: Part) -> str:
    has_indexer = isinstance(part, LatentAttention) and part.indexer is not None
    return WORDS[type(part)] + (" with an indexer" if has_indexer else "")


def checked(model_type: str, may_have_experts: bool) -> str:
    """Returns the layouts in which tests compare tiny models of the type with transformers and peft."""
    specs = {spec for kind, spec, _ in MATRIX if type_of_kind(kind) == model_type} - {"single"}
    own = sorted(spec for spec in specs if may_have_experts or "ep=" not in spec)
    return ", ".join(["one rank", *(f"`{spec}`" for spec in own)])


@cache
def type_of_kind(kind: str) -> str:
    return tiny_config(kind).model_type


def family_rows() -> Iterator[str]:
    """Yields a row of each module with families, from its docstring."""
    for info in iter_modules(families.__path__):
        module = import_module(f"{families.__name__}.{info.name}")
        own = [each for each in vars(module).values() if isinstance(each, Family)]
        types = sorted(model_type for model_type, each in DECLARED.items() if any(each is one for one in own))
        if types:
            text = re.sub(r"https?://[^\s),]*[^\s),.]", r"<\g<0>>", " ".join(str(module.__doc__).split()))
            yield f"| {names_of(types)} | {text} |\n"


def adapted_by_vllm(model_type: str) -> str:
    architectures = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    named = NAMES_IN_RELEASES.get(model_type) or str(architectures.get(model_type, model_type))
    form = FORMS.get(NAMES_IN_RELEASES.get(named, named))
    if form is None:
        return "not compared"
    if form.refusal is not None:
        return f"none: it {form.refusal}"
    missing = [*([] if form.adapts_head else ["lm_head"]), *(part.strip(".") for part in form.ignored)]
    return f"all but {names_of(missing)}" if missing else "all"


def names_of(names: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in dict.fromkeys(names))


def adapted(parts: Iterable[Part]) -> Iterator[str]:
    for part in parts:
        for weight in part.weights():
            below = weight.name.removeprefix(f"{part.name}.").removesuffix(".weight")
            yield from (below if len(weight.adapters) == 1 else each for each in weight.adapters)
        if isinstance(part, RoutedExperts):
            yield "experts.*"


def axes(shape: ModelShape) -> Iterator[str]:
    yield from ("tp", "sp")
    if shape.experts is not None:
        yield "ep"


def refused_rows(reasons: Mapping[str, str]) -> Iterator[str]:
    by_reason = defaultdict(list)
    for model_type, reason in reasons.items():
        by_reason[reason.removeprefix(f"{model_type} ").removesuffix(REFERENCE)].append(model_type)
    for reason, types in sorted(by_reason.items(), key=lambda each: -len(each[1])):
        yield f"| {reason} | {names_of(types)} |\n"


def plan_rows() -> Iterator[str]:
    with TemporaryDirectory() as directory:
        for name, config in configs().items():
            path = Path(directory) / f"{name}.json"
            path.write_text(json.dumps(config))
            for memory in MEMORIES:
                cells = " | ".join(plan_cell(path, memory, number) for number in DEVICES)
                yield f"| {name} | {memory[:-2]} GB | {cells} |\n"
        for name, model_type in REFUSED_LINEUP.items():
            path = Path(directory) / f"{name}.json"
            path.write_text(json.dumps({"model_type": model_type}))
            reason = refusal_by_plan(path).partition(f"{model_type} models are not supported: ")[2]
            yield f"| {name} | any | no: {reason}{' |' * len(DEVICES)}\n"


def configs() -> Mapping[str, Mapping[str, Any]]:
    here = json.loads((CONFIGS / "Qwen3-30B-A3B.json").read_text())
    return {"Qwen3-30B-A3B": here, **LINEUP}


def refusal_by_plan(path: Path) -> str:
    errors = StringIO()
    with redirect_stderr(errors):
        assert main(["plan", f"--base-model=M={path}", "--parallel=auto", f"--num-devices={DEVICES[-1]}"]) != 0
    return errors.getvalue().strip()


def plan_cell(path: Path, memory: str, number: int) -> str:
    """Returns the layout that fills these devices and GB on each, or the layout that needs least."""
    options = [f"--num-devices={number}", f"--device-memory={memory}", f"--max-context-length={TOKENS}", "--json"]
    out, errors = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(errors):
        status = main(["plan", f"--base-model=M={path}", "--parallel=auto", "--device-link=nvlink", *options])
    if status != 0:
        (found,) = re.findall(r": (\S+) with --activations (\S+) needs least, (\S+) GB", errors.getvalue())
        layout, activations, gigabytes = found
        return f"no: `{layout}` {activations}, {gigabytes}"
    plan = json.loads(out.getvalue())
    layout, activations = plan["filling"] or plan["parallel"], plan["load"]["activations"]
    gigabytes = f"{plan['memory']['total'] / 1e9:.1f}"
    return f"`{layout}` {'' if activations == 'keep' else activations}, {gigabytes}".replace(" ,", ",")


if __name__ == "__main__":
    DOCUMENT.write_text(document())
