"""Who imports whom; the directions between packages are contracts of import-linter in pyproject.toml."""

import grimp
from networkx import DiGraph, strongly_connected_components

PACKAGES = ("speculator", "data", "eval", "train")


def test_neither_modules_nor_folders_import_each_other_in_a_circle():
    # Imports inside functions count. Those for type checkers alone do not.
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True, cache_dir=None)
    packages = {module.rpartition(".")[0] for module in graph.modules} - {""}
    assert "speculator.target.cache" in packages
    circles = {package: graph.nominate_cycle_breakers(package) for package in packages}
    assert not {package: imports for package, imports in circles.items() if imports}


def test_no_modules_know_each_others_types():
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    links = ((module, other) for module in graph.modules for other in graph.find_modules_directly_imported_by(module))
    circles = strongly_connected_components(DiGraph(links))
    assert not [sorted(circle) for circle in circles if len(circle) > 1]
