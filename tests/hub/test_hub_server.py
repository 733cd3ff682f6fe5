"""The test server itself: the real client is content with it, over LFS, multipart and Xet, and its faults strike."""

import hashlib

import pytest

BLOB = bytes(range(256)) * 4000


def roundtrip(api, tmp_path):
    folder = tmp_path / "up"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(BLOB)
    (folder / "config.json").write_text("{}")
    api.create_repo("tester/m", private=True)
    first = api.upload_folder(repo_id="tester/m", folder_path=folder)
    again = api.upload_folder(repo_id="tester/m", folder_path=folder)
    assert again.oid == first.oid
    pulled = api.snapshot_download("tester/m", cache_dir=tmp_path / "c")
    return hashlib.sha256((tmp_path / pulled / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("multipart", [0, 100_000])
def test_what_goes_up_over_lfs_comes_down_equal(hub, client, tmp_path, multipart):
    hub.multipart = multipart
    api = client.HfApi(endpoint=hub.url)
    assert roundtrip(api, tmp_path) == hashlib.sha256(BLOB).hexdigest()
    assert len(hub.asked("^PUT /lfs/part/")) == (11 if multipart else 0)


def test_what_goes_up_over_xet_comes_down_equal(xet_hub, client, tmp_path):
    api = client.HfApi(endpoint=xet_hub.url)
    assert roundtrip(api, tmp_path) == hashlib.sha256(BLOB).hexdigest()
    assert xet_hub.tree("tester/m")["model.safetensors"].xet
    assert xet_hub.asked("^PUT /lfs/") == []


def test_pull_requests_hold_a_branch_of_their_own(hub, client):
    api = client.HfApi(endpoint=hub.url)
    api.create_repo("tester/m")
    pull = api.create_pull_request("tester/m", title="a change")
    api.upload_file(path_or_fileobj=b"x", path_in_repo="a.txt", repo_id="tester/m", revision=pull.git_reference)
    assert "a.txt" not in hub.tree("tester/m")
    assert [p.num for p in api.get_repo_discussions("tester/m", discussion_status="open")] == [1]
    api.change_discussion_status("tester/m", 1, "open")
    api.merge_pull_request("tester/m", 1)
    assert hub.content("tester/m", "a.txt") == b"x"


def test_private_gated_and_expired_are_told_apart(hub, client):
    from huggingface_hub import errors

    hub.put("tester/m", {"config.json": b"{}"})
    hub.repos["tester/m"].private = True
    with pytest.raises(errors.HfHubHTTPError, match="Repository Not Found"):
        client.HfApi(endpoint=hub.url, token=False).model_info("tester/m")
    hub.repos["tester/m"].gated = True
    with pytest.raises(errors.GatedRepoError):
        client.HfApi(endpoint=hub.url, token=hub.reader).hf_hub_download("tester/m", "config.json")
    hub.expired.add(hub.token)
    with pytest.raises(errors.HfHubHTTPError, match="Invalid credentials"):
        client.HfApi(endpoint=hub.url, token=hub.token).model_info("tester/m")


def test_a_fault_strikes_as_often_as_it_says(hub, client, hub_module, tmp_path):
    hub.put("tester/m", {"model.safetensors": BLOB})
    hub.faults.append(hub_module.Fault("^GET .*/resolve/", cut_after=300_000))
    hub.faults.append(hub_module.Fault("^GET .*/resolve/", status=429, headers={"Retry-After": "3"}))
    path = client.HfApi(endpoint=hub.url).hf_hub_download("tester/m", "model.safetensors")
    assert (tmp_path / path).read_bytes() == BLOB
    assert [(r.status, r.sent) for r in hub.asked("^GET .*/resolve/")][::2] == [(200, 300_000), (200, len(BLOB))]
    assert client.slept[-1] == 4.0
