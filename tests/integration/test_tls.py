# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""What is said about certificates that a real TLS server shows, and what there is to do about them."""

from __future__ import annotations

import http.server
import ssl
import subprocess
import threading
import typing as t
from pathlib import Path

import pytest
from ansible_collections.gpuops.serving.plugins.module_utils import _http

NAME = "localhost"


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates that are good, over, for another name, and of nobody."""
    folder = tmp_path_factory.mktemp("tls")
    own = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl(folder, *own, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=authority", "-days", "10")
    openssl(
        folder,
        *(*own, "-keyout", "self.key", "-out", "self.pem", "-subj", "/CN=" + NAME, "-days", "10"),
        *("-addext", "subjectAltName=DNS:" + NAME),
    )
    for name, host, days in (("good", NAME, "10"), ("over", NAME, "0"), ("other", "elsewhere.example", "10")):
        ask = ("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        openssl(folder, *ask, "-keyout", name + ".key", "-out", name + ".csr", "-subj", "/CN=" + host)
        (folder / "names").write_text("subjectAltName=DNS:%s\n" % host, encoding="ascii")
        sign = ("x509", "-req", "-in", name + ".csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial")
        openssl(folder, *sign, "-out", name + ".pem", "-days", days, "-extfile", "names")
    return folder


class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_words: t.Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_words: t.Any) -> None:
        pass


def answer(folder: Path, certificate: str, ca: t.Optional[str] = "ca.pem", validate: bool = True) -> _http.Answer:
    with Server(("127.0.0.1", 0), Quiet) as server:
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(folder / (certificate + ".pem"), folder / (certificate + ".key"))
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            access = _http.Access(validate_certs=validate, ca_path=str(folder / ca) if ca else None)
            url = "https://%s:%d/health" % (NAME, server.server_address[1])
            return _http.fetch(_http.Request("GET", url), access, 10)
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("certificate", "ca", "said"),
    [
        ("over", "ca.pem", "certificate has expired: renew the certificate of the server"),
        ("other", "ca.pem", "localhost'"),
        (
            "good",
            None,
            'unable to get local issuer certificate: name a file with the certificate of its authority in "ca',
        ),
        ("self", None, "self-signed certificate: name a file with this certificate in"),
        ("", "ca.pem", "the server does not speak it: use http:// in the URL"),
    ],
)
def test_the_problem_is_named_with_its_remedy(
    certificates: Path, certificate: str, ca: t.Optional[str], said: str
) -> None:
    found = answer(certificates, certificate, ca)
    assert found.outcome == "tls"
    assert found.error.startswith("TLS failed: ")
    # Older libraries write the word without a hyphen.
    assert said in found.error.replace("self signed", "self-signed")


def test_another_name_is_told_how_to_be_used(certificates: Path) -> None:
    found = answer(certificates, "other")
    assert found.error.endswith("use a name in the URL that the certificate has")


@pytest.mark.parametrize(
    ("certificate", "ca", "validate"), [("good", "ca.pem", True), ("self", "self.pem", True), ("over", None, False)]
)
def test_the_remedies_help(certificates: Path, certificate: str, ca: t.Optional[str], validate: bool) -> None:
    found = answer(certificates, certificate, ca, validate)
    assert (found.outcome, found.status) == ("answered", 200), found.error
