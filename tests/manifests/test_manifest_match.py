"""A rule's `match` speaks of whole module names, and takes no longer than reading them."""

import fnmatch
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from requant.manifests.errors import ManifestError
from requant.manifests.match import compile_match


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*", ["", "a", "a.b", "a\nb"], []),
        ("**", ["", "a.b"], []),
        ("lm_head", ["lm_head"], ["model.lm_head", "lm_head.x", "lm_headx", "LM_HEAD"]),
        (
            "layers.*.ffn.experts.*",
            ["layers.0.ffn.experts.0.w1", "layers.42.ffn.experts.255.w3"],
            [
                "mtp.0.ffn.experts.0.w1",
                "layers.0.ffn.shared_experts.w1",
                "layers.0.ffn.experts",
                "xlayers.0.ffn.experts.0",
            ],
        ),
        ("layers.1.*", ["layers.1.a"], ["layers.10.a", "layers.11.a", "layers.1"]),
        ("layers.?.a", ["layers.1.a"], ["layers.10.a", "layers..a"]),
        ("*.experts.*", ["m.experts.0"], ["m.shared_experts.0", "experts.0"]),
        ("*a*a*", ["aa", "xaxax"], ["a", "xax"]),
        ("a*a", ["aa", "aba"], ["a"]),
        ("*ab", ["ab", "aab", "abab"], ["aba"]),
        ("a.b", ["a.b"], ["axb"]),
        ("a[0-1].{b}", ["a[0-1].{b}"], ["a0.b"]),
        ("a+(b)|c", ["a+(b)|c"], ["aab", "c"]),
        (r"re:layers\.\d+\.w[13]", ["layers.10.w1"], ["layers.x.w1", "xlayers.1.w1", "layers.1.w1x"]),
        ("re:a|b", ["a", "b"], ["ab", "ax"]),
        ("re:(?i)HEAD", ["head"], ["heads"]),
    ],
)
def test_a_pattern_takes_whole_names(pattern, yes, no):
    match = compile_match(pattern)
    assert [name for name in yes if match(name) is not True] == []
    assert [name for name in no if match(name) is not False] == []


@given(st.text("ab.*?", max_size=8), st.text("ab.", max_size=10))
def test_globs_agree_with_the_standard_library(pattern, name):
    if pattern:
        assert compile_match(pattern)(name) == fnmatch.fnmatchcase(name, pattern)


@given(st.text(min_size=1, max_size=30))
def test_a_name_matches_itself_with_nothing_special_but_the_star_and_the_question_mark(name):
    if not name.startswith("re:"):
        assert compile_match(name)(name)


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("re:(", "not a valid regular expression: missing ), unterminated subpattern at position 0: 're:('"),
        ("re:[a", "not a valid regular expression: unterminated character set at position 0: 're:[a'"),
        (
            "re:a{99999999999}",
            "not a valid regular expression: the repetition number is too large: 're:a{99999999999}'",
        ),
        ("re:", "an empty pattern matches no module: 're:'"),
        ("", "an empty pattern matches no module: ''"),
    ],
)
def test_an_invalid_pattern_is_a_manifest_error(pattern, why):
    with pytest.raises(ManifestError, match=f"^{re.escape(why)}\n"):
        compile_match(pattern)


def test_half_a_million_names_are_matched_in_a_moment():
    names = [
        f"language_model.model.layers.{i // 2700}.block_sparse_moe.experts.{i % 900}.w{i % 3 + 1}"
        for i in range(500_000)
    ]
    match = compile_match("language_model.model.layers.*.block_sparse_moe.experts.*")
    started = time.process_time()
    assert sum(map(match, names)) == 500_000
    assert time.process_time() - started < 5  # about 0.3 s; the bound is for a machine that others use too


def test_many_stars_do_not_make_a_name_expensive():
    started = time.process_time()
    assert not compile_match("*a" * 30 + "*b")("a" * 5000)
    assert time.process_time() - started < 1
