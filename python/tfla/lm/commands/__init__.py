"""The commands of `python -m tfla.lm`: each module holds HELP, EXAMPLES, `add_arguments` and `run`."""

from types import ModuleType

from tfla.lm.commands import bench, eval, export, generate, import_, prepare, train

COMMANDS: dict[str, ModuleType] = {
    "prepare": prepare,
    "train": train,
    "eval": eval,
    "generate": generate,
    "export": export,
    "import": import_,
    "bench": bench,
}
