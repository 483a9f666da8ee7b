"""What the README shows works as it stands."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from forebay.errors import UserError
from forebay.planner.placement import PRESETS

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_example_differentiates_like_a_plain_scan():
    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], scope)  # pyright: ignore[reportOptionalSubscript]
    keys = jax.random.split(jax.random.key(0), 3)
    weights = {"in": jax.random.normal(keys[0], (32, 4, 8)) / 4, "out": jax.random.normal(keys[1], (32, 8, 4)) / 8}
    x = jax.random.normal(keys[2], (3, 4))

    def plain(weights, x):
        return jax.lax.scan(lambda x, w: (scope["block"](w, x), None), x, weights)[0].sum()

    ours, theirs = (jax.jit(jax.grad(f))(weights, x) for f in (scope["loss"], plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, theirs)


def test_the_python_example_with_a_misspelt_name_is_refused():
    import forebay

    scope: dict = {}
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], scope)  # pyright: ignore[reportOptionalSubscript]
    plan = forebay.Plan((forebay.Placement("layers", (0, 2), {"mlpwii": "host"}),))
    weights = {"in": jnp.ones((2, 4, 8)), "out": jnp.ones((2, 8, 4))}
    with pytest.raises(UserError, match="'mlpwii': did you mean 'mlpwi'"):
        forebay.scan_layers(scope["block"], plan, jnp.ones((3, 4)), weights)


def test_presets_named_in_the_readme_exist():
    named = {n for n in re.findall(r"`(\w+)`", README) if n.startswith(("minimal", "save_", "qkv_"))}
    assert named and named <= PRESETS.keys()


def test_pictures_and_pages_named_in_the_readme_exist():
    root = Path(__file__).parents[1]
    for target in re.findall(r"\]\(([^)]+)\)", README):
        assert (root / target).exists(), target
