"""Vision towers: which source tensor becomes which tensor of the projector file (mmproj) that llama.cpp loads apart.

One module a family, looked up by model class, with the same kind of answer as for the language model.
"""

from collections.abc import Callable, Mapping
from typing import Any

from ...checkpoint import Checkpoint
from ...errors import CheckpointError, UnsupportedArchitecture
from .. import Model

Table = Callable[[Mapping[str, Any], Mapping[str, Any], frozenset[str], str | None, int | None], Model]

# Where the models known here keep their vision tower and what leads from it to the language model.
TOWERS = ("model.vision_tower.", "model.merger.", "vision_tower.", "merger.", "model.visual.", "visual.")


def tables() -> dict[str, Table]:
    """Model class in config.json -> its table."""
    from . import minicpmv
    return minicpmv.CLASSES


def describe_projector(architecture: str, config: Mapping[str, Any], preprocessor: Mapping[str, Any],
                       modules: frozenset[str], projector: str | None = None, build: int | None = None) -> Model | None:
    """The projector of a checkpoint, None when it has no vision tower.

    config        config.json
    preprocessor  the image processor's settings, see `image_processor`
    modules       the names of all logical weights of the checkpoint
    projector     `clip.projector_type` to write instead of the one that belongs to the model
    build         the number of the oldest llama.cpp build that should load the file, None for a current one
    Raises UnsupportedArchitecture for a tower without a table and for settings that llama.cpp's graph does not compute,
    PlanError for a `projector` that does not fit the model or the build.
    """
    if not any(m.startswith(TOWERS) for m in modules):
        return None
    known = tables()
    if architecture not in known:
        raise UnsupportedArchitecture(f"the vision tower of {architecture} has no table here; known are those of "
                                      f"{', '.join(sorted(known))}. --no-mmproj converts the language model alone")
    return known[architecture](config, preprocessor, modules, projector, build)


def image_processor(checkpoint: Checkpoint) -> dict[str, Any]:
    """The image processor's settings: preprocessor_config.json, over it `image_processor` of processor_config.json.

    transformers writes the one or the other by version, and reads the second first. Empty when there is neither.
    """
    old = checkpoint.json("preprocessor_config.json") or {}
    new = (checkpoint.json("processor_config.json") or {}).get("image_processor") or {}
    if not isinstance(new, dict):
        raise CheckpointError(f"{checkpoint.path / 'processor_config.json'}: `image_processor` should be an object")
    return {**old, **new}
