"""Checks the snapshots, loaded checkpoints and evaluations of live runs, the weights of live samplers, and captured
features."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from ....schemas.adapters.tensor_file import TensorFile
from ...files.directories import directory_name
from ...files.manifest import ManifestMismatch, check_directory, read_manifest
from ...journal.journal import read_journal
from ...sampling.ephemeral_weights import EphemeralWeights, check_weights
from .problem import UNTIL_ITS_END, Problem, removal
from .state import VerifiedState

_NEW_RUN = f"start a new run from a checkpoint of it; {UNTIL_ITS_END}"


async def check_snapshots(state: VerifiedState) -> AsyncIterator[Problem]:
    begun = await asyncio.to_thread(_runs_from_their_beginning, state.live_dir / "journal")
    for run in await state.live_runs():
        directory = state.live_dir / "snapshots" / directory_name(run.run_id)
        pins = state.live_dir / "loaded" / directory_name(run.run_id)
        whole, damaged = await asyncio.to_thread(_check_all, sorted(directory.glob("[0-9]*")), pins)
        for path, error in damaged.items():
            can_go = bool(whole) or run.run_id in begun
            meaning = f"a snapshot of {run.run_id} is damaged: {error.reason}"
            remedy, repair = ("delete it by hand", removal(path)) if can_go else (_NEW_RUN, None)
            yield Problem(str(path), meaning, remedy, repair)
        if not whole and run.run_id not in begun:
            meaning = f"{run.run_id} cannot be rebuilt: neither a whole snapshot nor its first operation is left"
            yield Problem(str(directory), meaning, _NEW_RUN)


async def check_loaded(state: VerifiedState) -> AsyncIterator[Problem]:
    for run in await state.live_runs():
        directory = state.live_dir / "loaded" / directory_name(run.run_id)
        _, damaged = await asyncio.to_thread(_check_all, sorted(directory.glob("[0-9]*")))
        for path, error in damaged.items():
            meaning = f"a checkpoint that {run.run_id} has loaded is damaged: {error.reason}"
            yield Problem(str(path), meaning, f"do nothing if the run has a whole snapshot, else {_NEW_RUN}")


async def check_evaluations(state: VerifiedState) -> AsyncIterator[Problem]:
    for run in await state.live_runs():
        root = state.live_dir / "evaluations" / directory_name(run.run_id)
        places = {root / str(evaluation.seq_id): name for name, evaluation in run.schedules.evaluations.items()}
        _, damaged = await asyncio.to_thread(_check_all, list(places))
        for path, error in damaged.items():
            meaning = f"the data of evaluation {places[path]} of {run.run_id} are damaged: {error.reason}"
            yield Problem(str(path), meaning, "create the evaluation again; its steps have warnings until then")


def _check_all(
    directories: Sequence[Path], pins: Path | None = None
) -> tuple[list[Path], dict[Path, ManifestMismatch]]:
    """Returns the directories that match their manifests, and the error of each other one. `pins` has the targets that
    manifests of snapshots name."""
    damaged = {}
    for directory in directories:
        try:
            check_directory(directory)
            if pins is not None and (target := read_manifest(directory).get("target")) is not None:
                check_directory(pins / f"{target}-target")
        except ManifestMismatch as error:
            damaged[directory] = error
    return [directory for directory in directories if directory not in damaged], damaged


def _runs_from_their_beginning(journal: Path) -> set[str]:
    entries = (entry for path in sorted(journal.glob("*.segment")) for entry in read_journal(path))
    return {entry.header.run_id for entry in entries if entry.header.kind.startswith("create_model")}


async def check_ephemeral(state: VerifiedState) -> AsyncIterator[Problem]:
    weights = EphemeralWeights(state.live_dir / "ephemeral")
    remedy = f"they cannot be restored: save its run's weights for a new sampler; {UNTIL_ITS_END}"
    for adapter_id in await state.live_adapters():
        directory = weights.directory(adapter_id)
        if not weights.has(adapter_id):
            meaning = "the weights of a sampler are lost: its requests are answered 410"
            yield Problem(str(directory), meaning, remedy)
            continue
        try:
            await asyncio.to_thread(check_weights, directory)
        except ManifestMismatch as error:
            yield Problem(str(directory), f"the weights of a sampler are damaged: {error.reason}", remedy)


async def check_features(state: VerifiedState) -> AsyncIterator[Problem]:
    for path in sorted((state.live_dir / "features").glob("*/*.safetensors")):
        if not await asyncio.to_thread(_is_whole, path):
            remedy = "do nothing, or capture them again"
            yield Problem(str(path), "captured features are damaged: the draft's target runs instead of them", remedy)


def _is_whole(features: Path) -> bool:
    try:
        return TensorFile(features).is_whole()
    except FileNotFoundError:  # the server has deleted it meanwhile
        return True
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return False
