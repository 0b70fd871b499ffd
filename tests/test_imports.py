"""Who imports whom; the directions between packages are contracts of import-linter in pyproject.toml."""

import grimp


def test_neither_modules_nor_folders_import_each_other_in_a_circle():
    # Imports inside functions count. Those for type checkers alone do not.
    graph = grimp.build_graph("speculator", "data", "eval", "train", exclude_type_checking_imports=True, cache_dir=None)
    packages = {module.rpartition(".")[0] for module in graph.modules} - {""}
    assert "speculator.target.cache" in packages
    circles = {package: graph.nominate_cycle_breakers(package) for package in packages}
    assert not {package: imports for package, imports in circles.items() if imports}
