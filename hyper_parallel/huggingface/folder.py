"""A folder of safetensors files: where each tensor lies, from the index and the files' headers alone."""

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hyper_parallel.checkpoint.agreement import CheckpointError
from hyper_parallel.checkpoint.tensor_files import Stored, read_header

__all__ = ["CONFIG", "INDEX", "Folder"]

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Folder:
    """Files are read when their tensors are asked for: of each, the header."""

    path: Path
    _headers: dict[str, dict[str, Stored]] = field(default_factory=dict)

    @cached_property
    def file_of(self) -> dict[str, str]:
        """The file of every tensor of the folder.

        Raises:
            CheckpointError: no safetensors files here, or an index that cannot be read.
        """
        index = self.path / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{index} is no index of safetensors files: {error!r}") from error
        files = sorted(path.name for path in self.path.glob("*.safetensors"))
        if not files:
            raise CheckpointError(
                f"{self.path} holds no *.safetensors files; a model in other files has to be saved as safetensors "
                "first (save_pretrained of transformers does it)"
            )
        return {name: file for file in files for name in self._header(file)}

    def find(self, name: str) -> tuple[str, Stored] | None:
        """The file of a tensor and where it lies in it, or None for a name that is not here.

        Raises:
            CheckpointError: the file that should hold it is missing, truncated, or without it.
        """
        file = self.file_of.get(name)
        if file is None:
            return None
        if name not in self._header(file):
            raise CheckpointError(f"{self.path / INDEX} says that {name} is in {file}, and it is not; copy both again")
        return file, self._header(file)[name]

    def _header(self, file: str) -> dict[str, Stored]:
        if file not in self._headers:
            path = self.path / file
            if not path.is_file():
                raise CheckpointError(f"{path} is missing, and {INDEX} names it; copy the whole folder")
            self._headers[file] = read_header(path)
        return self._headers[file]
