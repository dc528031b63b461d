"""Tokens and TLS files."""

from __future__ import annotations

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st
from shoal_common.errors import AuthenticationError, ConfigurationError, PermissionDeniedError
from shoal_common.security.authentication import Holder, Role, TlsSettings, TokenTable

TABLE = TokenTable({"alpha-token": Role.ADMIN, "beta-token": "worker"})


def test_token_maps_to_its_role():
    assert TABLE.holder_of("Bearer alpha-token").role is Role.ADMIN
    assert TABLE.holder_of("bearer beta-token").role is Role.WORKER


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        (None, "TOKEN_MISSING"),
        ("", "TOKEN_MISSING"),
        ("Bearer ", "TOKEN_INVALID"),
        ("Bearer alpha-toke", "TOKEN_INVALID"),
        ("alpha-token", "TOKEN_INVALID"),
        ("Basic alpha-token", "TOKEN_INVALID"),
    ],
)
def test_anything_else_is_refused_without_echoing_it(authorization, reason):
    with pytest.raises(AuthenticationError) as refused:
        TABLE.holder_of(authorization)
    assert refused.value.reason == reason
    assert "alpha" not in str(refused.value)


@given(st.text())
def test_malformed_headers_are_never_accepted(authorization):
    with pytest.raises(AuthenticationError):
        TABLE.holder_of(authorization)


def test_a_token_file_has_roles_comments_and_blank_lines(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(
        "# the cluster's tokens\n\nadmin: aaa\n  worker : b:b\nviewer:ccc\nadmin: aaa\n"
    )
    table = TokenTable.from_file(path)
    assert [table.holder_of(f"Bearer {token}").role for token in ("aaa", "b:b", "ccc")] == [
        Role.ADMIN,
        Role.WORKER,
        Role.VIEWER,
    ]
    assert not table.is_open


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("admin aaa", "line 1: found no colon; expected `role: token`"),
        ("\nroot: aaa", "line 2: unknown role 'root'"),
        ("admin:", "line 1: invalid token; expected printable"),
        ("worker@: aaa", "line 1: 'worker@': expected a job id after the @"),
        ("worker@a/b: aaa", "expected a job id"),
        ("root@job: aaa", "unknown role 'root'"),
        (
            "worker@one: same\nworker@two: same",
            "line 2: this token already has the role worker@one",
        ),
        ("admin: a b", "line 1: invalid token; expected printable"),
        ("admin: ü", "line 1: invalid token; expected printable"),
        ("admin: same\nworker: same", "line 2: this token already has the role admin"),
        ("# nothing\n", "contains no token"),
        (b"\xff\xfe", "cannot read the token file"),
    ],
)
def test_a_wrong_token_file_is_one_error_with_its_line(tmp_path, text, expected):
    path = tmp_path / "tokens"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigurationError, match=expected) as refused:
        TokenTable.from_file(path)
    assert "aaa" not in str(refused.value)


def test_a_missing_token_file_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="nowhere"):
        TokenTable.from_file(tmp_path / "nowhere")


def test_tokens_do_not_appear_in_reprs():
    assert repr(TABLE) == "TokenTable(2 tokens)"
    assert TokenTable.open().is_open


@pytest.fixture(scope="module")
def pems(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pems")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(directory / "ca.pem")
    for name in ("one", "two"):
        issued = authority.issue_cert(f"{name}.test")
        issued.private_key_pem.write_to_path(directory / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(directory / f"{name}.pem")
    (directory / "garbage").write_text("not a certificate")
    return directory


def test_matching_tls_files_are_read(pems):
    material = TlsSettings(
        certificate=pems / "one.pem", key=pems / "one.key", authority=pems / "ca.pem"
    ).load()
    assert material.certificate.startswith(b"-----BEGIN")
    assert material.authority == (pems / "ca.pem").read_bytes()
    assert "BEGIN" not in repr(material)


@pytest.mark.parametrize(
    ("certificate", "key", "authority", "named"),
    [
        ("one.pem", "two.key", None, "certificate and key"),
        ("garbage", "one.key", None, "certificate and key"),
        ("one.pem", "nowhere", None, "certificate and key"),
        (None, None, "garbage", "authority"),
        (None, None, "nowhere", "authority"),
    ],
)
def test_wrong_tls_files_are_named_before_any_handshake(pems, certificate, key, authority, named):
    paths = {
        name: pems / file
        for name, file in (("certificate", certificate), ("key", key), ("authority", authority))
        if file
    }
    with pytest.raises(ConfigurationError, match=f"TLS {named}"):
        TlsSettings(**paths).load()


def test_half_of_a_tls_pair_and_a_wrong_client_authority_are_refused(pems):
    with pytest.raises(ConfigurationError, match="certificate is set without its key"):
        TlsSettings(certificate=pems / "one.pem")
    with pytest.raises(ConfigurationError, match="key is set without its certificate"):
        TlsSettings(key=pems / "one.key")
    with pytest.raises(ConfigurationError, match="TLS client authority"):
        TlsSettings(
            certificate=pems / "one.pem", key=pems / "one.key", client_authority=pems / "garbage"
        ).load()


def test_token_may_be_for_one_job_and_its_launchers_rendezvous(tmp_path):
    path = tmp_path / "tokens"
    path.write_text("worker@train-1: aaa\nworker: bbb\n")
    table = TokenTable.from_file(path)
    bound, free = (table.holder_of(f"Bearer {token}") for token in ("aaa", "bbb"))
    assert (bound, str(bound)) == (Holder(Role.WORKER, "train-1"), "worker@train-1")
    for job_id in ("train-1", "train-1.nodes", "train-1.torchrun"):
        bound.check_job(job_id)
    for job_id in ("train-2", "train-1.x", "train", "train-11", "TRAIN-1"):
        free.check_job(job_id)
        with pytest.raises(PermissionDeniedError, match="'train-1'") as refused:
            bound.check_job(job_id)
        assert refused.value.reason == "JOB_NOT_ALLOWED"
