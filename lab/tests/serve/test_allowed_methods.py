"""Options of the lab's methods that a request may set: none that names a file, and no function."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from lab_matrix import LAB, MASKED
from shoal import methods
from shoal.serve import policy
from shoal.serve.errors import ApiError
from shoal.serve.settings import Settings
from shoal_lab.methods.deer import DEER
from shoal_lab.methods.rapid import Rapid


def test_no_free_text_of_a_request_names_a_file() -> None:
    texts_that_name_none = {("a_star", "delimiter"), ("trimr", "opening"), ("trimr", "closing"), ("trimr", "cues"),
                            ("diffusion_grammar", "rules")}
    for name in set(policy.allowed(Settings())) & {method.name for method in (*LAB, *MASKED)}:
        method = methods.get(name)
        hints = get_type_hints(method)
        free = {knob for knob in method.option_names() if {str, object, Path} & {hints[knob], *get_args(hints[knob])}}
        for knob in sorted(free):
            if (name, knob) in texts_that_name_none:
                continue
            with pytest.raises(ApiError, match=f"{knob} of {name} names a file") as error:
                policy.choose(name, {knob: "/some/folder"}, Settings())
            assert error.value.status == 403
    assert policy.choose("rapid", {"length": 4}, Settings()) == Rapid(length=4)
    assert policy.choose("rapid", {"draft": "m"}, Settings(methods=frozenset({"rapid"}))) == Rapid(draft="m")
    assert policy.choose("deer", {"draft": "m"}, Settings(methods=frozenset({"deer"}))) == DEER(draft="m")
    with pytest.raises(ApiError, match="must be a function") as error:
        policy.choose("rapid", {"likeness": "os.system"}, Settings())
    assert error.value.status == 400


def test_methods_that_find_all_they_need_in_the_model_are_allowed() -> None:
    allowed = set(policy.allowed(Settings()))
    assert {"jacobi", "centroid_kv", "mustafar"} <= allowed
    assert not {"mirror_sd", "vocabtrim", "deer"} & allowed
