"""Where a wheel keeps the packages of this checkout; pyproject.toml has everything else."""

from setuptools import find_packages, setup

WORKSHOP = ("data", "eval", "train")
FOLDERS = ("configs", "examples/stdlib_target")

moved = {
    f"speculator._workshop.{name}": name for name in find_packages(include=[*WORKSHOP, *(f"{n}.*" for n in WORKSHOP)])
}
setup(
    packages=[
        *find_packages(include=["speculator", "speculator.*"]),
        *moved,
        *(f"speculator._workshop.{folder.replace('/', '.')}" for folder in FOLDERS),
    ],
    package_dir={
        **{new: name.replace(".", "/") for new, name in moved.items()},
        **{f"speculator._workshop.{folder.replace('/', '.')}": folder for folder in FOLDERS},
    },
)
