# Copyright: (c) 2026, gpuops.serving contributors
# GNU General Public License v3.0 or later (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Lab hosts with the real docker and podman of their release, and an image "tiny" that is made from the host itself."""

from __future__ import annotations

import concurrent.futures
import json
import typing as t

from gpulab import common, packages, state
from labhosts import LabHosts

RUNTIME = common.LAB / "files" / "containers" / "lab-runtime"
PACKAGES = ("busybox-static", "systemd-container", "crun", "docker.io", "podman")
NETWORK = ("iptables", "nftables", "iproute2", "uidmap", "slirp4netns")
# What other releases have in the packages above, or do not have.
BY_RELEASE = {"trixie": ("docker-cli",)}
NETWORK_BY_RELEASE = {"trixie": ("netavark", "aardvark-dns"), "bullseye": ("containernetworking-plugins",)}
# Folders of the host that a container needs for the host's python3, and for what a test puts into /opt.
HOST_FOLDERS = " ".join("--volume={0}:{0}:ro".format(folder) for folder in ("/usr", "/lib", "/lib64", "/opt"))

SET_UP = r"""
cat > /usr/local/bin/lab-runtime; chmod 755 /usr/local/bin/lab-runtime
ldconfig; systemctl daemon-reload; groupadd --system docker
mkdir -p /etc/docker /etc/containers /var/lib/docker /var/lib/containers
mount -t tmpfs tmpfs /var/lib/docker; mount -t tmpfs tmpfs /var/lib/containers
# The scripts of packages that choose among alternatives are not run here.
for n in iptables ip6tables iptables-save ip6tables-save iptables-restore ip6tables-restore; do
    ! test -e /usr/sbin/xtables-nft-multi || ln -sf xtables-nft-multi /usr/sbin/$n
done
cat > /etc/containers/containers.conf <<"X"
[containers]
keyring = false
default_ulimits = []
{podman}
[engine]
events_logger = "file"
cgroup_manager = "systemd"
runtime = "lab"
[engine.runtimes]
lab = ["/usr/local/bin/lab-runtime"]
X
cat > /etc/containers/storage.conf <<"X"
[storage]
driver = "vfs"
runroot = "/run/containers/storage"
graphroot = "/var/lib/containers/storage"
X
echo '{"default": [{"type": "insecureAcceptAnything"}]}' > /etc/containers/policy.json
mkdir -p /srv/image; cd /srv/image; mkdir -p bin dev etc lib lib64 opt proc run sys tmp usr; cp /bin/busybox bin
"""
DOCKERD = r"""
systemctl stop dockerd 2>/dev/null || :
cat > /etc/docker/daemon.json <<"X"
{daemon}
X
systemd-run --quiet --unit=dockerd -p Delegate=yes -p KillMode=process dockerd
"""
ANSWERS = "for i in $(seq 300); do ! docker info >/dev/null 2>&1 || exit 0; sleep 0.1; done; exit 7"
IMAGES = r"""
tar -C /srv/image -c . | docker import - tiny >/dev/null
tar -C /srv/image -c . | podman import --quiet - tiny >/dev/null
"""
# An ordinary user who may run podman: {user}
ROOTLESS = r"""
useradd --create-home {user}; echo "{user}:100000:65536" | tee /etc/subuid >/etc/subgid
chmod u+s /usr/bin/newuidmap /usr/bin/newgidmap; chmod 666 /dev/net/tun
tar -C /srv/image -c . >/tmp/tiny.tar; chmod 644 /tmp/tiny.tar
mkdir -p /run/{user} /home/{user}/.config/containers; cd /home/{user}/.config/containers
printf '[storage]\ndriver = "vfs"\nrunroot = "/run/{user}/storage"\ngraphroot = "/home/{user}/storage"\n' >storage.conf
sed 's/= "systemd"/= "cgroupfs"/' /etc/containers/containers.conf >containers.conf
chown -R {user} /run/{user} /home/{user}; cd /
export HOME=/home/{user} XDG_RUNTIME_DIR=/run/{user}
runuser -u {user} -- podman import --quiet /tmp/tiny.tar tiny >/dev/null
"""


class ContainerHosts(LabHosts):
    """Hosts with docker and podman; ``networks`` says whether containers get networks of their own."""

    def __init__(self, name: str, specs: t.Mapping[str, str], networks: bool = False) -> None:
        super().__init__(name, specs)
        self.networks = networks

    def install(self, hosts: t.Mapping[str, t.Sequence[str]]) -> None:
        """Put packages on hosts, on each those that are named for it."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(self._install, hosts, hosts.values()))

    def _install(self, host: str, names: t.Sequence[str]) -> None:
        release = self.specs[host].split(",")[0]
        if "docker.io" in names:
            names = (*names, *BY_RELEASE.get(release, ()))
        if self.networks:
            names = (*names, *NETWORK, *NETWORK_BY_RELEASE.get(release, ()))
        lab = state.find(self.name)
        packages.put(lab, lab.host(host), packages.tree(release, names))

    def prepare(self) -> None:
        """Set docker and podman up, and make the image."""
        podman = "" if self.networks else 'netns = "host"'
        self.everywhere(SET_UP.replace("{podman}", podman) + self.daemon(), RUNTIME.read_text(encoding="utf-8"))
        self.everywhere("(%s); %s" % (ANSWERS, IMAGES))

    def let_run(self, user: str) -> None:
        """Make a user who may run podman without being root."""
        self.everywhere(ROOTLESS.replace("{user}", user))

    def daemon(self, **options: t.Any) -> str:
        """A script that starts the docker daemon with these options, anew where it runs."""
        given: t.Dict[str, t.Any] = {"storage-driver": "vfs", "default-runtime": "lab"}
        given["exec-opts"] = ["native.cgroupdriver=systemd"]
        given["runtimes"] = {"lab": {"path": "/usr/local/bin/lab-runtime"}}
        if not self.networks:
            given.update({"iptables": False, "ip6tables": False, "bridge": "none"})
        return DOCKERD.replace("{daemon}", json.dumps(dict(given, **options)))
