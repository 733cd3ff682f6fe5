"""Every trap of YAML and every wrong value is told with its exact place, its text and what to do.

In the tables, «» stand around what the caret must underline; file, line, column and width all follow from them.
"""
# ruff: noqa: E501  one case, one line

import re
from pathlib import Path

import pytest
from requant.manifests.errors import ExitCode, ManifestError
from requant.manifests.load import load_manifest

GOOD = """\
version: 1
name: x
source: {path: a}
target: {format: nvfp4, output: o}
layers: [{match: "*", to: nvfp4}]
"""


@pytest.fixture
def faults_of(tmp_path):
    """Loads a text and returns the error's lines, with the file called m.yaml."""

    def load(text, *sets, encoding="utf-8", **environ):
        path = tmp_path / "m.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode(encoding))
        with pytest.raises(ManifestError) as caught:
            load_manifest(path, sets, environ=environ)
        assert caught.value.exit_code == ExitCode.USAGE == 2
        return str(caught.value).replace(str(tmp_path) + "/", "").split("\n")

    return load


def told(marked, what):
    """A text without its marks, and the three lines that must be told about it."""
    before, inside, after = re.fullmatch("(.*)«(.*)»(.*)", marked, re.DOTALL).groups()
    number, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
    text = before + inside + after
    return text, [
        f"m.yaml:{number}:{column}: {what}",
        f"{number:>5} | {text.split(chr(10))[number - 1]}",
        "      | " + " " * (column - 1) + "^" + "~" * (len(inside) - 1),
    ]


# name: (a whole text, what is told)
SYNTAX = {
    'star alone': ('match: «*»', 'a value that begins with * must be quoted, or YAML takes it for an alias: write "*"'),
    'star and dot': ('a:\n  match: «*.foo»', 'a value that begins with * must be quoted, or YAML takes it for an alias: write "*.foo"'),
    'star in braces': ('l:\n- {match: «*», to: keep}', 'a value that begins with * must be quoted, or YAML takes it for an alias: write "*"'),
    'star and word': ('l:\n- {match: «*foo», to: keep}', 'a value that begins with * must be quoted, or YAML takes it for an alias: write "*foo"'),
    'star in brackets': ('l: [«*a.b», c]', 'a value that begins with * must be quoted, or YAML takes it for an alias: write "*a.b"'),
    'tab at the start': ('a:\n«\t»b: 1', 'a tab; YAML is indented with spaces only'),
    'tab after spaces': ('a: 1\n  «\t»b: 2', 'a tab; YAML is indented with spaces only'),
    'tab after a key': ('a:«\t»b', 'a tab; YAML is indented with spaces only'),
    'two documents': ('a: 1\n«-»--\nb: 2', 'a second document begins here; a manifest is one document'),
    'second colon': ('a: re«:» foo', 'a second `: ` in one value; put the value in quotes'),
    'no space after a colon': ('a:1\nb«:» 2', 'a key cannot stand here: the line above lacks its `: `, or this line is indented too far'),
    'regex in double quotes': (r'a: "re:\«d»"', r"in double quotes \ starts an escape; write regular expressions in 'single quotes'"),
    'quotes left open': ('a: 1\nb: «"»x\nc: 2\n', 'the quotes or brackets opened before are never closed'),
    'at sign': ('a: «@»x', 'a value cannot begin with this character; put it in quotes'),
    'bare interpolation in braces': ('{output: $«{»env:X}/foo}', 'inside { } a value with ${env:NAME} must be quoted'),
    'text after quotes': ("a: 'x' «y»", 'this follows a value that is already complete; put the whole value in quotes'),
    'bad indentation': ('a:\n   b: 1\n  «c»: 2', 'this line does not fit the indentation or the list above it'),
    'python object': ('a: «!»!python/object/apply:os.system [x]', 'the tag !!python/object/apply:os.system is not supported; a manifest holds plain values only'),
    'string tag': ('a: «!»!str 1', 'the tag !!str is not supported; a manifest holds plain values only'),
    'local tag': ('a: «!»x 1', 'the tag !x is not supported; a manifest holds plain values only'),
    'list on top': ('«- a»', 'a manifest is a mapping (key: value), not a list'),
    'text on top': ('«hello»', 'a manifest is a mapping (key: value), not a single value'),
    'alias to itself': ('a: «&x [*x]»', 'this anchor holds an alias to itself'),
}  # fmt: skip


@pytest.mark.parametrize("case", SYNTAX)
def test_yaml_that_is_no_manifest_names_its_place_and_the_remedy(faults_of, case):
    text, lines = told(*SYNTAX[case])
    assert faults_of(text) == lines


# name: (lines after a good manifest, what is told)
VALUES = {
    'unknown key': ('«exeucte»: {}', "unknown key 'exeucte'; did you mean 'execute'?"),
    'unknown key in a section': ('execute: {«wrokers»: 1}', "unknown key 'wrokers' in execute; did you mean 'workers'?"),
    'key of another section': ('«shard_size»: 5GB', "unknown key 'shard_size'; did you mean target.shard_size?"),
    'key like nothing': ('execute: {«zzz»: 1}', "unknown key 'zzz' in execute; it takes workers, device, engine, ray_address, stream, max_disk, work"),
    'merge key': ('«<<»: {kv_cache: fp8}', 'merge keys (<<) are not supported; use include, or repeat the lines'),
    'complex key': ('? «[a]»\n: b', 'a key must be a word, not a list or a mapping'),
    'duplicate key': ('kv_cache: null\n«kv_cache»: fp8', "the key 'kv_cache' stands here twice (first in line 6)"),
    'bad choice': ('execute: {device: «gpu»}', "execute.device: 'gpu' is not one of auto, cpu, cuda; did you mean 'cuda'?"),
    'misspelled choice': ('execute: {engine: «locl»}', "execute.engine: 'locl' is not one of local, ray; did you mean 'local'?"),
    'choice in capitals': ('kv_cache: «FP8»', "kv_cache: 'FP8' is not one of fp8; did you mean 'fp8'?"),
    'yes for true': ('execute: {stream: «yes»}', "execute.stream: 'yes' is not true or false; write true"),
    'off for false': ('validate: {numerics: {required: «off»}}', "validate.numerics.required: 'off' is not true or false; write false"),
    'one for true': ('execute: {stream: «1»}', "execute.stream: '1' is not true or false; write true"),
    'quoted true': ('execute: {stream: «"true"»}', "execute.stream: 'true' is not true or false; write true without quotes"),
    'true for a number': ('execute: {workers: «true»}', "execute.workers: 'true' is neither a whole number nor auto"),
    'leading zero': ('execute: {workers: «010»}', "execute.workers: '010' is neither a whole number nor auto (a leading zero: YAML 1.1 would read it in octal); write 10 or 8"),
    'leading zero, no octal': ('validate: {model: {text: t, tokens: «08»}}', "validate.model.tokens: '08' is not a whole number (a leading zero: YAML 1.1 would read it in octal); write 8"),
    'base 60': ('validate: {model: {text: t, tokens: «1:30»}}', "validate.model.tokens: '1:30' is not a whole number (YAML 1.1 would read it in base 60)"),
    'underscores': ('validate: {model: {text: t, tokens: «8_192»}}', "validate.model.tokens: '8_192' is not a whole number; write 8192"),
    'hexadecimal': ('validate: {model: {text: t, tokens: «0x10»}}', "validate.model.tokens: '0x10' is not a whole number; write it in decimal"),
    'quoted number': ('validate: {kernels: {max_rel_error: «"1e-3"»}}', "validate.kernels.max_rel_error: '1e-3' is not a number; write 1e-3 without quotes"),
    'fraction of a worker': ('execute: {workers: «1.5»}', "execute.workers: '1.5' is neither a whole number nor auto"),
    'no worker': ('execute: {workers: «0»}', "execute.workers: '0' is out of range; it must be at least 1"),
    'NaN': ('activations: {input_scale: «.nan»}', "activations.input_scale: '.nan' is not a finite number"),
    'infinity': ('activations: {input_scale: «1e999»}', "activations.input_scale: '1e999' is not a finite number"),
    'zero scale': ('activations: {input_scale: «0»}', "activations.input_scale: '0' is out of range; it must be above 0 and a normal FP32 number"),
    'negative scale': ('activations: {input_scale: «-1e-3»}', "activations.input_scale: '-1e-3' is out of range; it must be above 0 and a normal FP32 number"),
    'scale that FP32 loses': ('activations: {input_scale: «1e-40»}', "activations.input_scale: '1e-40' is out of range; it must be above 0 and a normal FP32 number"),
    'scale above FP32': ('activations: {input_scale: «1e39»}', "activations.input_scale: '1e39' is out of range; it must be an FP32 number"),
    'scale of no kind': ('activations: {input_scale: «yes»}', "activations.input_scale: 'yes' is neither a number nor {from: ...}"),
    'scale from a number': ('activations: {input_scale: {from: «3»}}', 'activations.input_scale.from: YAML reads \'3\' as a number, and text is needed; write "3" in quotes'),
    'scale twice': ('activations: {calibrate: {text: t}, input_scale: «2»}', 'activations.input_scale: input_scale and calibrate exclude each other: delete one'),
    'scale missing': ('activations: {input_scale: «null»}', 'activations.input_scale: target.format: nvfp4 needs activation scales (vLLM computes NaN without); write 1.0, or use target.format: nvfp4-w4a16'),
    'empty section': ('validate:\n  kernels:«»\n', 'validate.kernels has no value; write one, or null for none, or {} for all defaults'),
    'list for a section': ('«execute»: [auto]', 'execute must be a mapping with the keys workers, device, engine, ray_address, stream, max_disk, work, not a list'),
    'missing key': ('validate: {«model»: {tokens: 5}}', "validate.model lacks the key 'text' (File with the text to score, UTF-8)"),
    'disk without stream': ('execute: {max_disk: «40GB»}', 'execute.max_disk: max_disk bounds a streamed conversion; did you mean to set stream: true?'),
    'disk without unit': ('execute: {stream: «true», max_disk: 40}', 'execute.stream: stream fetches from the Hub or an object store, and the source is a folder; set source.repo or delete it'),
    'ray address without ray': ('execute: {ray_address: «auto»}', 'execute.ray_address: ray_address has no meaning with engine: local; did you mean engine: ray?'),
    'slack in a lossless gate': ('validate: {numerics: {lossless: required, max_lossy_tensors: «1»}}', 'validate.numerics.max_lossy_tensors: lossless: required allows none; write lossless: report to allow some'),
    'requests per concurrency': ('validate: {speed: {concurrency: [1, 8], «requests»: [8]}}', 'validate.speed.requests: 1 numbers for 2 concurrencies; give one for each'),
    'idle streams': ('validate: {speed: {concurrency: [1, 8], requests: [8, «4»]}}', 'validate.speed.requests.1: 4 requests cannot keep 8 streams busy; give at least 8'),
    'no server': ('validate: {«serving»: {label: a}}', 'validate.serving: exactly one of endpoint and launch must be given; neither is'),
    'two servers': ("validate: {«serving»: {endpoint: 'http://h:1', launch: x}}", 'validate.serving: exactly one of endpoint and launch must be given; both are'),
    'endpoint without scheme': ("validate: {serving: {endpoint: «'h:1'»}}", "validate.serving.endpoint: 'h:1' is not an address that starts with http:// or https://"),
    'publish nowhere': ('publish: {repo: «acme»}', "publish.repo: 'acme' is not a repository on the Hub, owner/name"),
    'backspace': (r'kv_cache: «"\bfp8"»', r"a control character in the text (in double quotes \b is a backspace)"),
    'unset variable': ('kv_cache: «${env:KV}»', 'the environment variable KV is not set; give a default: ${env:KV:-...}'),
    'not an interpolation': ('kv_cache: a-«${KV}»', '${KV} is not understood; write ${env:NAME} or ${env:NAME:-default} ($${ for ${)'),
    'unclosed interpolation': ('kv_cache: «${env:KV»', '${env:KV is not understood; write ${env:NAME} or ${env:NAME:-default} ($${ for ${)'),
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_a_wrong_value_is_told_with_its_place_and_what_was_meant(faults_of, case):
    marked, what = VALUES[case]
    text, lines = told(GOOD + marked, what)
    assert faults_of(text) == lines


# name: (lines that replace those of the same key in a good manifest, what is told)
SECTIONS = {
    'two sources': ('source: {path: «a», repo: b/c}', 'source.path: exactly one of repo and path must say where the checkpoint is; both do'),
    'no source': ('«source»: {}', 'source: exactly one of repo and path must say where the checkpoint is; neither does'),
    'revision of a folder': ('source: {path: a, revision: «v2»}', 'source.revision: a revision belongs to source.repo; a folder given by source.path has none'),
    'number as a revision': ('source: {repo: a/b, revision: «1234567»}', 'source.revision: YAML reads \'1234567\' as a number, and text is needed; write "1234567" in quotes'),
    'exponent as a revision': ('source: {repo: a/b, revision: «12e5»}', 'source.revision: YAML reads \'12e5\' as a number, and text is needed; write "12e5" in quotes'),
    'null path': ('source: {repo: a/b, revision: «null»}', 'source.revision: YAML reads \'null\' as null, and text is needed; write "null" in quotes'),
    'true as a name': ('name: «true»', 'name: YAML reads \'true\' as true or false, and text is needed; write "true" in quotes'),
    'name with a slash': ('name: «a/b»', "name: 'a/b' is not a name: up to 96 letters, digits, '.', '_' and '-', the first a letter or digit"),
    'version 2': ('version: «2»', "version: this program reads version 1, not '2'"),
    'version true': ('version: «true»', "version: this program reads version 1, not 'true'"),
    'version 1.0 in quotes': ('version: «"1"»', "version: this program reads version 1, not '1'"),
    'no layers': ('«layers»: []', 'layers is an empty list; give at least one entry'),
    'one layer without list': ('layers: «keep»', "layers must be a list, not 'keep'; write [keep]"),
    'nothing converted': ('«layers»: [{match: "*", to: keep}]', 'layers: no rule converts anything; target.format: nvfp4 needs a rule with to: nvfp4'),
    'another format': ('layers: [{match: "*", to: «mxfp4»}]', 'layers.0.to: to: mxfp4 does not go with target.format: nvfp4, which takes nvfp4, fp8, bf16, keep and drop'),
    'only a side format': ('target: {format: «nvfp4», output: o}\nlayers: [{match: "*", to: fp8}]', 'target.format: no rule makes nvfp4: none of them says to: nvfp4'),
    'scale on keep': ('layers: [{match: a, to: nvfp4}, {match: "*", to: keep, scale: «mse»}]', 'layers.1.scale: scale: mse has no meaning with to: keep (nothing is rescaled)'),
    'scale for another format': ('layers: [{match: "*", to: fp8, scale: «four-over-six»}]', 'layers.0.scale: scale: four-over-six has no meaning with to: fp8 (it takes nearest, lossless, mse)'),
    'lossless from plain': ('source: {path: a, layout: plain}\nlayers: [«{match: "*", to: nvfp4}»]', 'layers.0.scale: to: nvfp4 from source.layout: plain must round; write scale: nearest (only FP4 sources need not)'),
    'same match twice': ('layers: [{match: a, to: nvfp4}, {match: «a», to: keep}]', 'layers.1.match: no module gets here: layers.0 has the same match'),
    'rule behind a catch-all': ('layers: [{match: "*", to: nvfp4}, {match: «a», to: keep}]', 'layers.1.match: no module gets here: layers.0 matches everything; put the catch-all last'),
    'tensor for a module': ('layers: [{match: «a.weight», to: nvfp4}]', "layers.0.match: rules name modules, not tensors; did you mean 'a'?"),
    'bad regex': ("layers: [{match: «'re:('», to: nvfp4}]", 'layers.0.match: not a valid regular expression: missing ), unterminated subpattern at position 0'),
    'empty match': ('layers: [{match: «""», to: nvfp4}]', 'layers.0.match must not be empty'),
    'empty regex': ('layers: [{match: «"re:"», to: nvfp4}]', 'layers.0.match: an empty pattern matches no module'),
    'size without unit': ('target: {format: nvfp4, output: o, shard_size: «5G»}', "target.shard_size: '5G' is not a size: write a number and a unit, such as 5GB or 512MiB; did you mean '5GB'?"),
    'five bytes': ('target: {format: nvfp4, output: o, shard_size: «5»}', 'target.shard_size: 5 bytes is no useful shard: say between 1KB and 1TB, such as 5GB'),
    'eleven terabytes': ('target: {format: nvfp4, output: o, shard_size: «11TB»}', 'target.shard_size: 11000000000000 bytes is no useful shard: say between 1KB and 1TB, such as 5GB'),
    'runtime twice': ('target: {format: nvfp4, output: o, runtimes: [vllm, «vllm»]}', "target.runtimes.1: 'vllm' stands here twice"),
    'split experts of mxfp4': ('target: {format: mxfp4, output: o, layout: «modelopt-experts»}', 'target.layout: layout modelopt-experts is defined for nvfp4 and nvfp4-w4a16, not for mxfp4'),
    'output is the source': ('target: {format: nvfp4, output: «./a/»}', 'target.output: the output folder is the source folder; the source is never written to'),
}  # fmt: skip


@pytest.mark.parametrize("case", SECTIONS)
def test_sections_that_contradict_themselves_or_each_other_are_told(faults_of, case):
    marked, what = SECTIONS[case]
    new = {line.strip("«").split(":")[0].rstrip("»"): line for line in marked.split("\n")}
    text, lines = told("\n".join(new.get(line.split(":")[0], line) for line in GOOD.split("\n")), what)
    assert faults_of(text) == lines


@pytest.mark.parametrize("kind", ["nvfp4-w4a16", "mxfp4", "bf16"])
@pytest.mark.parametrize("scale", ["input_scale: 1.0", "calibrate: {text: t}"])
def test_a_format_without_activation_scales_refuses_one(faults_of, kind, scale):
    to = kind.removesuffix("-w4a16")
    text = GOOD.replace("format: nvfp4", f"format: {kind}").replace("to: nvfp4", f"to: {to}")
    key = scale.split(":", maxsplit=1)[0]
    (first, *_) = faults_of(text + f"activations: {{{scale}}}")
    column = 28 if key == "input_scale" else 15
    assert (
        first == f"m.yaml:6:{column}: activations.{key}: target.format: {kind} has no activation scales; delete {key}"
    )


def test_a_lossless_gate_over_a_rounding_rule_is_refused_before_hours_of_work(faults_of):
    text = GOOD.replace("to: nvfp4", "to: nvfp4, scale: mse") + "validate: {numerics: {lossless: required}}"
    what = "lossless: required cannot hold: layers.0 rounds (scale: mse); bound it by min_sqnr_db"
    assert faults_of(text)[0] == f"m.yaml:6:33: validate.numerics.lossless: {what}"


def test_publishing_into_the_source_repository_is_refused(faults_of):
    text = GOOD.replace("{path: a}", "{repo: a/b}") + "publish: {repo: a/b}"
    what = "publish.repo: the result would go into the repository that the source came from"
    assert faults_of(text)[0] == f"m.yaml:6:17: {what}"


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "\ufeff"])
def test_an_empty_file_says_how_a_manifest_starts(faults_of, text):
    assert faults_of(text) == ["m.yaml:1:1: the file is empty; a manifest starts with `version: 1`"]


def test_bytes_that_are_not_utf8_are_named_with_their_place(faults_of):
    assert faults_of(b"a: 1\nb: caf\xe9 x\n") == [
        "m.yaml:2:7: byte 0xE9 is not UTF-8; save the file as UTF-8",
        "    2 | b: caf\N{REPLACEMENT CHARACTER} x",
        "      |       ^",
    ]


def test_utf16_is_recognised(faults_of):
    what = "m.yaml:1:1: byte 0xFF is not UTF-8 (the file looks like UTF-16); save the file as UTF-8"
    assert faults_of("\ufeffa: 1", encoding="utf-16-le")[0] == what


def test_a_byte_order_mark_is_no_fault(tmp_path):
    path = tmp_path / "m.yaml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load_manifest(path, environ={}).manifest.name == "x"


def test_a_nul_byte_is_named(faults_of):
    assert faults_of("a: \x00")[0] == "m.yaml:1:4: the character U+0000 is not allowed in YAML"


def test_windows_line_ends_do_not_shift_lines(faults_of):
    text, lines = told(GOOD + "«exeucte»: {}", "unknown key 'exeucte'; did you mean 'execute'?")
    assert faults_of(text.replace("\n", "\r\n")) == lines


def test_a_weight_file_given_as_a_manifest_is_not_parsed(faults_of):
    what = "1048577 bytes; a manifest is a small YAML file, not a weight file"
    assert faults_of(b"\0" * (2**20 + 1)) == [f"m.yaml:1:1: {what}"]


def test_nesting_without_end_is_a_fault_and_not_a_crash(faults_of):
    assert faults_of("[" * 20000)[0] == "m.yaml:1:1: nested too deeply to be a manifest"


def test_aliases_cannot_blow_up_memory(faults_of):
    bomb = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 10))
    assert faults_of(bomb)[0].endswith("more than 100000 values once its aliases are written out")


def test_anchors_and_aliases_work_where_they_save_repetition(tmp_path):
    path = tmp_path / "m.yaml"
    text = GOOD.replace('[{match: "*", to: nvfp4}]', "[{match: a, to: &to nvfp4}, {match: b, to: *to}]")
    path.write_text(text)
    assert [rule.to for rule in load_manifest(path, environ={}).manifest.layers] == ["nvfp4", "nvfp4"]


def test_control_characters_of_a_file_do_not_reach_the_terminal(faults_of):
    lines = faults_of(GOOD + 'kv_cache: "a\u200b\u202e"')
    assert lines[0] == "m.yaml:6:11: a control character in the text (in double quotes \\b is a backspace)"
    assert lines[1] == '    6 | kv_cache: "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"'


def test_the_caret_stands_under_wide_characters(faults_of):
    lines = faults_of(GOOD.replace("{path: a}", "{path: 模型, layuot: auto}"))
    assert lines[1:] == ["    3 | source: {path: 模型, layuot: auto}", "      |                      ^~~~~~"]


def test_a_long_line_is_cut_around_the_fault(faults_of):
    lines = faults_of(GOOD + "execute: {" + " " * 500 + "wrokers: 1" + " " * 500 + "}")
    assert lines[0] == "m.yaml:6:511: unknown key 'wrokers' in execute; did you mean 'workers'?"
    assert lines[1] == "    6 | " + " " * 60 + "wrokers: 1" + " " * 50
    assert lines[2] == "      | " + " " * 60 + "^~~~~~~"


def test_every_fault_is_told_at_once_in_the_order_of_the_file(faults_of):
    text = """\
version: 1
name: my model
source:
  path: a
  layuot: auto
target: {format: nvpf4, output: "${env:REQUANT_OT}/x", shard_size: 5G}
layers:
  - {match: "layers.*", to: nvfp4, scale: losless}
  - {match: "*", to: keep}
activations: {input_scale: -1}
activations: {input_scale: 1}
execute: {workers: 010, ray_address: auto}
validate:
  kernels:
  model: {tokens: "5"}
"""
    lines = faults_of(text, "kv_cache=fp7", REQUANT_OUT="o")
    assert [line for line in lines if line.startswith(("m.yaml", "--set"))] == [
        "m.yaml:2:7: name: 'my model' is not a name: up to 96 letters, digits, '.', '_' and '-', the first a letter "
        "or digit",
        "m.yaml:5:3: unknown key 'layuot' in source; did you mean 'layout'?",
        "m.yaml:6:18: target.format: 'nvpf4' is not one of nvfp4, nvfp4-w4a16, mxfp4, fp8, bf16; did you mean 'nvfp4'?",
        "m.yaml:6:34: the environment variable REQUANT_OT is not set; did you mean 'REQUANT_OUT'? or give a default: "
        "${env:REQUANT_OT:-...}",
        "m.yaml:6:68: target.shard_size: '5G' is not a size: write a number and a unit, such as 5GB or 512MiB; "
        "did you mean '5GB'?",
        "m.yaml:8:43: layers.0.scale: 'losless' is not one of lossless, nearest, four-over-six, mse, weighted; "
        "did you mean 'lossless'?",
        "m.yaml:10:28: activations.input_scale: '-1' is out of range; it must be above 0 and a normal FP32 number",
        "m.yaml:11:1: the key 'activations' stands here twice (first in line 10)",
        "m.yaml:12:20: execute.workers: '010' is neither a whole number nor auto (a leading zero: YAML 1.1 would read "
        "it in octal); write 10 or 8",
        "m.yaml:14:11: validate.kernels has no value; write one, or null for none, or {} for all defaults",
        "m.yaml:15:3: validate.model lacks the key 'text' (File with the text to score, UTF-8)",
        "m.yaml:15:19: validate.model.tokens: '5' is not a whole number; write 5 without quotes",
        "--set:1:10: kv_cache: 'fp7' is not one of fp8; did you mean 'fp8'?",
    ]
    assert lines[-1] == "13 faults; nothing was read or written"


def test_contradictions_between_sound_sections_are_told_beside_a_faulty_one(faults_of):
    text = GOOD.replace("to: nvfp4", "to: mxfp4").replace("output: o", "output: a") + "execute: {workers: 0}"
    assert [line.split(": ")[0] for line in faults_of(text) if line.startswith("m.yaml")] == [
        "m.yaml:4:33",  # output is the source
        "m.yaml:5:27",  # to: mxfp4
        "m.yaml:6:20",
    ]


def test_a_missing_file_lists_the_built_in_manifests():
    with pytest.raises(ManifestError) as caught:
        load_manifest("deepseek-v4-flsh", environ={})
    assert str(caught.value) == (
        "deepseek-v4-flsh: no such file, and no built-in manifest of that name; did you mean 'deepseek-v4-flash'?\n"
        "  -> built-in manifests: deepseek-v4-flash, deepseek-v4-pro, gpt-oss-120b, gpt-oss-20b, kimi-k3"
    )


def test_a_folder_is_no_manifest(tmp_path):
    with pytest.raises(ManifestError) as caught:
        load_manifest(tmp_path, environ={})
    assert str(caught.value) == (
        f"{tmp_path}: this is a folder, not a manifest\n  -> requant init {tmp_path} makes a manifest of a checkpoint"
    )


def test_names_that_no_file_system_takes_are_manifest_errors():
    for name in ("x" * 5000, "a\0b"):
        with pytest.raises(ManifestError, match="cannot be read"):
            load_manifest(name, environ={})


def test_a_device_is_not_read(tmp_path):
    with pytest.raises(ManifestError, match="not a regular file"):
        load_manifest(Path("/dev/null"), environ={})
