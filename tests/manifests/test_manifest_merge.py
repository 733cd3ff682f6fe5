"""Includes, `--set` and `${env:}`: who wins, from where, and what is never done silently."""

import re

import pytest
from requant.manifests.errors import ManifestError
from requant.manifests.load import load_manifest
from requant.manifests.merge import Resolver
from requant.manifests.yamltree import Scalar, resolve_plain

GOOD = """\
version: 1
name: x
source: {repo: acme/m, revision: v2}
target: {format: nvfp4, output: o, runtimes: [vllm]}
layers: [{match: "a.*", to: nvfp4}, {match: "*", to: keep}]
"""


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def faults(path, *sets, **environ):
    with pytest.raises(ManifestError) as caught:
        load_manifest(path, sets, environ=environ)
    return [re.sub(r"/\S*/", "", line) for line in str(caught.value).split("\n")]


def test_an_included_file_gives_way_key_by_key_and_lists_are_replaced(write):
    write("base.yaml", GOOD)
    path = write("m.yaml", "include: [base.yaml]\nname: y\ntarget: {runtimes: [sglang], output: p}\n")
    manifest = load_manifest(path, environ={}).manifest
    assert (manifest.name, manifest.target.output, manifest.target.runtimes) == ("y", "p", ("sglang",))
    assert manifest.target.format == "nvfp4"
    assert manifest.source.revision == "v2"
    assert manifest.include == ()


def test_of_two_includes_the_later_wins_and_the_files_read_are_known(write):
    base = write("base.yaml", GOOD)
    one = write("sub/one.yaml", "include: [../base.yaml]\nname: one\nkv_cache: fp8\n")
    two = write("two.yaml", "name: two\n")
    path = write("m.yaml", "include: [sub/one.yaml, two.yaml]\n")
    loaded = load_manifest(path, environ={})
    assert (loaded.manifest.name, loaded.manifest.kv_cache) == ("two", "fp8")
    assert loaded.files == tuple(file.resolve() for file in (path, one, base, two))


def test_the_same_file_may_be_included_by_two_ways(write):
    write("base.yaml", GOOD)
    write("one.yaml", "include: [base.yaml]\nname: one\n")
    path = write("m.yaml", "include: [one.yaml, base.yaml]\n")
    assert load_manifest(path, environ={}).manifest.name == "x"


def test_a_built_in_manifest_can_be_included_by_name(write):
    path = write("m.yaml", "include: [deepseek-v4-flash]\nname: mine\nsource: {path: /models/v4}\n")
    source = load_manifest(path, environ={}).manifest.source
    assert (source.repo, source.path, source.revision, source.layout) == (None, "/models/v4", "main", "deepseek-v4")


def test_a_cycle_of_includes_is_told_where_it_closes(write):
    write("a.yaml", "include:\n  - b.yaml\n" + GOOD)
    path = write("b.yaml", "include: [a.yaml]\n")
    assert faults(path)[:3] == [
        "a.yaml:2:5: this include leads back to a file that is being read: b.yaml -> a.yaml -> b.yaml",
        "    2 |   - b.yaml",
        "      |     ^~~~~~",
    ]


def test_a_file_that_includes_itself_is_told(write):
    path = write("m.yaml", GOOD + "include: [m.yaml]\n")
    assert faults(path)[0] == ("m.yaml:6:11: this include leads back to a file that is being read: m.yaml -> m.yaml")


def test_a_missing_include_proposes_the_file_beside_it(write):
    write("base.yaml", GOOD)
    path = write("m.yaml", GOOD + "include: [bsae.yaml]\n")
    assert faults(path) == [
        "m.yaml:6:11: no such file: bsae.yaml; did you mean 'base.yaml'?",
        "    6 | include: [bsae.yaml]",
        "      |           ^~~~~~~~~",
    ]


@pytest.mark.parametrize(
    ("include", "where", "what"),
    [
        ("base.yaml", "6:1", "include must be a list of files: write include: [base.yaml]"),
        ("[1]", "6:11", "an entry of include must be the name of a file"),
        ("[[a]]", "6:11", "an entry of include must be the name of a file"),
        ("['${env:NO}']", "6:12", "the environment variable NO is not set; give a default: ${env:NO:-...}"),
    ],
)
def test_an_include_that_is_no_list_of_files_is_told(write, include, where, what):
    assert faults(write("m.yaml", GOOD + f"include: {include}\n"))[0] == f"m.yaml:{where}: {what}"


def test_a_fault_in_an_included_file_is_told_there_after_those_of_the_file_itself(write):
    write("base.yaml", GOOD.replace("nvfp4, output", "nvpf4, output"))
    path = write("m.yaml", "include: [base.yaml]\nkv_cache: fp7\n")
    assert [line for line in faults(path) if ".yaml:" in line] == [
        "m.yaml:2:11: kv_cache: 'fp7' is not one of fp8; did you mean 'fp8'?",
        "base.yaml:4:18: target.format: 'nvpf4' is not one of nvfp4, nvfp4-w4a16, mxfp4, fp8, bf16; "
        "did you mean 'nvfp4'?",
    ]


def test_a_faulty_value_that_is_overridden_is_no_fault(write):
    write("base.yaml", GOOD.replace("output: o", "output: '${env:UNSET}'"))
    path = write("m.yaml", "include: [base.yaml]\ntarget: {output: p}\n")
    assert load_manifest(path, environ={}).manifest.target.output == "p"


def test_null_takes_an_inherited_section_away(write):
    write("base.yaml", GOOD + "publish: {repo: a/b}\n")
    path = write("m.yaml", "include: [base.yaml]\npublish: null\n")
    assert load_manifest(path, environ={}).manifest.publish is None


@pytest.mark.parametrize(
    ("below", "above", "attribute", "expected"),
    [
        ("activations: {input_scale: 2}", "activations: {calibrate: {text: t}}", "input_scale", None),
        ("activations: {calibrate: {text: t}}", "activations: {input_scale: 2}", "calibrate", None),
        ("activations: {calibrate: {text: t}}", "activations: {input_scale: 2}", "input_scale", 2.0),
    ],
)
def test_keys_that_exclude_each_other_displace_each_other(write, below, above, attribute, expected):
    write("base.yaml", GOOD + below)
    path = write("m.yaml", f"include: [base.yaml]\n{above}\n")
    assert getattr(load_manifest(path, environ={}).manifest.activations, attribute) == expected


def test_set_replaces_a_value_and_reads_it_as_yaml(write):
    path = write("m.yaml", GOOD)
    sets = [
        "execute.workers=4",
        "layers.0.scale=mse",
        "layers.1={match: '*', to: drop}",
        "validate.numerics={min_sqnr_db: 2e1}",
        'name="4"',
    ]
    manifest = load_manifest(path, sets, environ={}).manifest
    assert manifest.execute.workers == 4
    assert [(rule.match, rule.to, rule.scale) for rule in manifest.layers] == [
        ("a.*", "nvfp4", "mse"),
        ("*", "drop", "lossless"),
    ]
    assert manifest.validation.numerics.min_sqnr_db == 20.0
    assert manifest.name == "4"


def test_of_two_settings_the_later_wins(write):
    path = write("m.yaml", GOOD)
    assert load_manifest(path, ["name=a", "name=b"], environ={}).manifest.name == "b"


def test_setting_a_path_displaces_the_repository_and_its_revision(write):
    source = load_manifest(write("m.yaml", GOOD), ["source.path=/models/m"], environ={}).manifest.source
    assert (source.repo, source.path, source.revision) == (None, "/models/m", "main")


def test_setting_into_a_section_that_is_null_or_absent_makes_it(write):
    path = write("m.yaml", GOOD + "publish: null\n")
    manifest = load_manifest(path, ["publish.repo=a/b", "validate.kernels.modules=all"], environ={}).manifest
    assert (manifest.publish.repo, manifest.validation.kernels.modules) == ("a/b", "all")


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        ("name", ["--set:1:1: 'name' is not of the form a.b=value", "    1 | name", "      | ^~~~"]),
        ("a..b=1", ["--set:1:1: 'a..b=1' is not of the form a.b=value", "    1 | a..b=1", "      | ^~~~~~"]),
        ("=1", ["--set:1:1: '=1' is not of the form a.b=value", "    1 | =1", "      | ^~"]),
        (
            "kv_cache=",
            [
                '--set:1:1: no value after =; write null, or "" for empty text: kv_cache=\'""\'',
                "    1 | kv_cache=",
                "      | ^~~~~~~~~",
            ],
        ),
        (
            "layers.2.to=keep",
            [
                "--set:1:8: '2' is no entry of layers, which has 2 entries, counted from 0",
                "    1 | layers.2.to=keep",
                "      |        ^",
            ],
        ),
        (
            "layers.first.to=keep",
            [
                "--set:1:8: 'first' is no entry of layers, which has 2 entries, counted from 0",
                "    1 | layers.first.to=keep",
                "      |        ^~~~~",
            ],
        ),
        (
            "name.x=1",
            ["--set:1:6: name is the value 'x', so it has no 'x' to set", "    1 | name.x=1", "      |      ^"],
        ),
        (
            "target.formt=nvfp4",
            [
                "--set:1:8: unknown key 'formt' in target; did you mean 'format'?",
                "    1 | target.formt=nvfp4",
                "      |        ^~~~~",
            ],
        ),
        (
            "target.format=NVFP5",
            [
                "--set:1:15: target.format: 'NVFP5' is not one of nvfp4, nvfp4-w4a16, mxfp4, fp8, bf16; "
                "did you mean 'nvfp4'?",
                "    1 | target.format=NVFP5",
                "      |               ^~~~~",
            ],
        ),
        (
            "target.runtimes=[vllm",
            [
                "--set:1:22: expected , or ] here (inside [ ], quote a value that holds brackets)",
                "    1 | target.runtimes=[vllm",
                "      |                      ^",
            ],
        ),
        (
            "layers.0.match=*",
            [
                '--set:1:16: a value that begins with * must be quoted, or YAML takes it for an alias: write "*"',
                "    1 | layers.0.match=*",
                "      |                ^",
            ],
        ),
    ],
)
def test_a_faulty_setting_is_shown_as_it_was_typed(write, argument, told):
    assert faults(write("m.yaml", GOOD), argument) == told


def test_a_variable_is_put_into_text(write):
    path = write("m.yaml", GOOD.replace("output: o", "output: '${env:A}/${env:B:-b}/$${C}'"))
    assert load_manifest(path, environ={"A": "a"}).manifest.target.output == "a/b/${C}"


@pytest.mark.parametrize(("environ", "expected"), [({}, "out"), ({"O": ""}, "out"), ({"O": "x"}, "x")])
def test_a_default_stands_in_for_a_variable_that_is_unset_or_empty_as_in_a_shell(write, environ, expected):
    path = write("m.yaml", GOOD.replace("output: o", "output: '${env:O:-out}'"))
    assert load_manifest(path, environ=environ).manifest.target.output == expected


def test_an_empty_variable_without_a_default_is_a_fault(write):
    path = write("m.yaml", GOOD.replace("output: o", "output: '${env:O}'"))
    assert faults(path, O="") == [
        "m.yaml:4:34: the environment variable O is empty; give a default: ${env:O:-...}",
        "    4 | target: {format: nvfp4, output: '${env:O}', runtimes: [vllm]}",
        "      |                                  ^~~~~~~~",
    ]


def test_a_variable_without_quotes_can_be_a_number_and_in_quotes_is_text(write):
    path = write("m.yaml", GOOD + "execute:\n  workers: ${env:N:-4}\n")
    assert load_manifest(path, environ={}).manifest.execute.workers == 4
    path = write("m.yaml", GOOD + 'execute:\n  workers: "${env:N:-4}"\n')
    assert faults(path)[0] == (
        "m.yaml:7:12: execute.workers: '4' is neither a whole number nor auto; write 4 without quotes"
    )


def test_a_variable_cannot_add_structure_to_a_manifest(write):
    path = write("m.yaml", GOOD.replace("output: o", "output: '${env:O}'") + "kv_cache: ${env:K:-null}\n")
    evil = "o, shard_size: 1KB}\npublish: {repo: evil/x}\n#"
    manifest = load_manifest(path, environ={"O": evil}).manifest
    assert (manifest.target.output, manifest.publish) == (evil, None)


def test_the_environment_is_not_read_when_one_is_given(write, monkeypatch):
    monkeypatch.setenv("REQUANT_TEST_VARIABLE", "x")
    path = write("m.yaml", GOOD.replace("output: o", "output: '${env:REQUANT_TEST_VARIABLE}'"))
    assert "not set" in faults(path)[0]
    assert load_manifest(path).manifest.target.output == "x"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 100000.0),
        ("5e-3", 0.005),
        (".5", 0.5),
        ("-3", -3),
        ("+4", 4),
        ("0", 0),
        ("1.", 1.0),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("010", "010"),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        ("0x1F", "0x1F"),
        ("0o17", "0o17"),
        ("2024-01-01", "2024-01-01"),
        ("=", "="),
        ("~", None),
        ("Null", None),
        ("True", True),
        ("FALSE", False),
        ("5GB", "5GB"),
        ("9" * 401, "9" * 401),
    ],
)
def test_a_plain_scalar_is_what_yaml_1_2_says_and_text_where_the_versions_differ(text, value):
    made = resolve_plain(text)
    assert (made, type(made)) == (value, type(value))


def test_infinities_and_nan_are_read_and_left_to_the_schema_to_refuse():
    assert (resolve_plain(".inf"), resolve_plain("-.INF")) == (float("inf"), float("-inf"))
    assert resolve_plain(".nan") != resolve_plain(".nan")


def test_a_quoted_scalar_stays_text():
    resolver = Resolver({})
    assert resolver.scalar(Scalar("1e-3", False, None), ("a",)) == "1e-3"
    assert resolver.scalar(Scalar("null", False, None), ("a",)) == "null"
