"""What a script contains, collected by the slicer and written down by ``render``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ddp_equivalence.report.script.slicing.import_statements import ImportStatements
from ddp_equivalence.report.script.slicing.output_names import OutputNames
from ddp_equivalence.report.script.slicing.source import Edit
from ddp_equivalence.report.script.slicing.source_module import SourceModule


@dataclass
class Fragment:
    """A part of a module's text that goes into the script.

    ``span``: its bytes in the file. ``edits``: the changes to its text, most of them new names.
    ``annotation_removals``: edits for a script that cannot have the fragment's annotations.
    ``finish`` is applied to the edited text.
    """

    module: SourceModule
    span: tuple[int, int]
    edits: list[Edit] = field(default_factory=list)
    annotation_removals: list[Edit] = field(default_factory=list)
    finish: Callable[[str], str] = str


@dataclass
class Contents:
    """The parts of a script, from its imports to its last line.

    ``constants`` stand above all definitions, ``assignments`` below those of the user and of the
    catalogue. ``fragments``: by file, order in the script (0 for statements at the top level of the
    file, more for local definitions), and position in the file. ``modules``: the modules of the
    fragments, by file. ``dependencies``: file -> the files that it takes names from.
    ``local_files``: files that the script imports though they are not installed.
    ``files_using_their_path``: files whose code reads ``__file__``. ``main``: the function that
    the script calls.
    """

    names: OutputNames = field(default_factory=OutputNames)
    imports: ImportStatements = field(default_factory=ImportStatements)
    constants: dict[str, str] = field(default_factory=dict)
    assignments: dict[str, str] = field(default_factory=dict)
    fragments: dict[tuple[str, int, int], Fragment] = field(default_factory=dict)
    modules: dict[str, SourceModule] = field(default_factory=dict)
    dependencies: dict[str, set[str]] = field(default_factory=dict)
    local_files: set[str] = field(default_factory=set)
    files_using_their_path: set[str] = field(default_factory=set)
    main: str = ""
    _files_being_edited: list[str] = field(default_factory=list)

    def add_constant(self, name: str, expression: str) -> str:
        """Bind a name above all definitions; return the name that it gets in the script."""
        output = self.names.free(name, f"THE_{name}")
        self.constants[output] = expression
        return output

    def add_assignment(self, name: str, expression: str) -> str:
        """Bind a name below the definitions that it uses; return the name that it gets."""
        output = self.names.free(name, f"the_{name}")
        self.assignments[output] = expression
        return output

    @contextmanager
    def editing(self, module: SourceModule) -> Iterator[None]:
        """In this block, ``add_dependency_on`` adds dependencies of this module."""
        self._files_being_edited.append(module.source.file)
        try:
            yield
        finally:
            self._files_being_edited.pop()

    def add_dependency_on(self, module: SourceModule) -> None:
        """Record that the module which is being edited takes a name from this module."""
        if self._files_being_edited:
            user = self._files_being_edited[-1]
            self.dependencies.setdefault(user, set()).add(module.source.file)
