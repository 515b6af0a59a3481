//! The Debian package, from build to purge, with a real systemd.

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kernel_images::{ImageCache, root};
use serde_json::Value;

use super::container::Container;
use super::{Context, missing, run_within, succeed_within, tiny};
use crate::e2e::{Result, Verdict};
use crate::published::Published;

/// Deadline of building the package.
const BUILD_DEADLINE: Duration = Duration::from_secs(120);
/// Deadline of installing and of removing it.
const APT_DEADLINE: Duration = Duration::from_secs(120);
/// Deadline of the guest; it takes a second on an idle machine.
const VM_DEADLINE: Duration = Duration::from_secs(60);
/// Deadline of a small command.
const SHORT: Duration = Duration::from_secs(30);

/// The device of the package's udev rule; absent in kernels without it.
const USERFAULTFD: &str = "/sys/devices/virtual/misc/userfaultfd";

const SERVICE: &str = "ssi-hv-node.service";
/// Highest exposure, of 100, in `systemd-analyze security`, which calls less than 20 "OK" or
/// better.
const EXPOSURE_MAX: u32 = 20;

/// Lists every file of the machine, except other file systems, what dpkg, apt, systemd and man-db
/// record, and the copies of the lists of users from before their last change.
const LISTING: &str = "find / -xdev \\( -path /var/lib/dpkg -o -path /var/lib/apt -o -path /var/cache \
    -o -path /var/log -o -path /tmp -o -path /var/tmp -o -path /var/lib/systemd/catalog -o -path '/etc/*shadow-' \
    -o -path /etc/passwd- -o -path /etc/group- \\) -prune \
    -o -printf '%y %m %u:%g %p %l\\n' | sort";

/// Files that the package must install.
const FILES: &[&str] = &[
    "/usr/bin/ssi-hv",
    "/etc/default/ssi-hv-node",
    "/usr/lib/sysusers.d/ssi-hv.conf",
    "/lib/systemd/system/ssi-hv-node.service",
    "/lib/udev/rules.d/60-ssi-hv.rules",
    "/usr/share/bash-completion/completions/ssi-hv",
    "/usr/share/zsh/vendor-completions/_ssi-hv",
    "/usr/share/fish/vendor_completions.d/ssi-hv.fish",
    "/usr/share/man/man1/ssi-hv.1.gz",
    "/usr/share/man/man1/ssi-hv-run.1.gz",
    "/usr/share/man/man1/ssi-hv-node.1.gz",
    "/usr/share/doc/ssi-hv/copyright",
    "/usr/share/doc/ssi-hv/changelog.gz",
    "/usr/share/doc/ssi-hv/changelog.Debian.gz",
    "/usr/share/doc/ssi-hv/THIRD-PARTY.gz",
    "/usr/share/doc/ssi-hv/README.md",
    "/usr/share/doc/ssi-hv/docs/design.md",
    "/usr/share/doc/ssi-hv/docs/grafana-dashboard.json",
];

pub(super) fn check(context: &Context) -> Result {
    let needed = [
        ("dpkg-buildpackage", "dpkg-dev"),
        ("dh", "debhelper"),
        ("mmdebstrap", "mmdebstrap"),
        ("systemd-nspawn", "systemd-container"),
        ("nsenter", "util-linux"),
    ];
    if let Some(reason) = needed.iter().find_map(|(command, of)| missing(command, of)) {
        return Ok(Verdict::Skip(reason));
    }
    let mut make = Command::new(context.workspace.join("scripts/package"));
    let made = succeed_within(make.arg("--no-build"), BUILD_DEADLINE)?;
    let deb = Path::new(made.lines().last().context("no package was named")?);
    lint(context, deb)?;

    let images = context.workspace.join("target/images");
    let files = match ImageCache::open(&images).and_then(|cache| root::ensure(&cache)) {
        Ok(files) => files,
        Err(error) => return Ok(Verdict::Skip(format!("no bare Debian: {error}"))),
    };
    let dir = deb.parent().context("a package without a directory")?;
    let log = context.artifacts.join("container.log");
    let debian = match Container::boot(&files, dir, &log) {
        Ok(debian) => debian,
        Err(error) if !may_make_containers() => {
            return Ok(Verdict::Skip(format!("no containers here: {error:#}")));
        }
        Err(error) => return Err(error),
    };
    let name = deb.file_name().unwrap_or_default().to_string_lossy();
    installs(context, &debian, &name)?;
    unit(context, &debian)?;
    let verdict = lends(context, &debian, &name)?;
    Ok(verdict)
}

/// Returns whether this process has the privileges for a container, without which a failed start is
/// not the package's fault.
fn may_make_containers() -> bool {
    Command::new("unshare")
        .args(["--mount", "--pid", "--fork", "--uts", "--ipc", "--cgroup"])
        .args(["mount", "-t", "tmpfs", "none", "/mnt"])
        .output()
        .is_ok_and(|output| output.status.success())
}

/// Checks that Debian's lintian finds nothing.
fn lint(context: &Context, deb: &Path) -> anyhow::Result<()> {
    if let Some(reason) = missing("lintian", "lintian") {
        context.note(format!("lintian was not run: {reason}"));
        return Ok(());
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--allow-root", "--fail-on", "error,warning"]);
    let output = run_within(lintian.arg(deb), BUILD_DEADLINE)?;
    ensure!(
        output.status.success() && output.stdout.trim().is_empty(),
        "lintian: {}{}",
        output.stdout,
        output.stderr
    );
    Ok(())
}

/// Installs the package and checks its contents.
fn installs(context: &Context, debian: &Container, deb: &str) -> anyhow::Result<()> {
    debian.check(&format!("{LISTING} >/tmp/before"), SHORT)?;
    let install = format!("apt-get install -y --no-install-recommends /package/{deb}");
    debian.check(&install, APT_DEADLINE)?;
    let listed = debian.check("dpkg -L ssi-hv", SHORT)?;
    for file in FILES {
        ensure!(
            listed.lines().any(|line| line == *file),
            "no {file}: {listed}"
        );
    }
    let damaged = debian.check("dpkg --verify ssi-hv", SHORT)?;
    ensure!(damaged.is_empty(), "not as it was packed: {damaged}");
    let version = debian.check("ssi-hv --version", SHORT)?;
    ensure!(
        version.trim() == concat!("ssi-hv ", env!("CARGO_PKG_VERSION")),
        "{version}"
    );

    for page in ["ssi-hv", "ssi-hv-run", "ssi-hv-node"] {
        let shown = debian.run(&format!("MANWIDTH=80 man --warnings {page}"), SHORT)?;
        ensure!(
            shown.status.success() && shown.stderr.is_empty() && shown.stdout.contains("SYNOPSIS"),
            "{page}: {shown:?}"
        );
    }
    let complete = ". /usr/share/bash-completion/bash_completion; _completion_loader ssi-hv; complete -p ssi-hv";
    let completion = debian.check(&format!("bash -c '{complete}'"), SHORT)?;
    ensure!(completion.contains("-F "), "no completion: {completion}");
    opens_the_device(context, debian)
}

/// Checks what udev would do with the device, as far as its dry run shows.
fn opens_the_device(context: &Context, debian: &Container) -> anyhow::Result<()> {
    if !Path::new(USERFAULTFD).exists() {
        context.note(format!("the udev rule was not tried: no {USERFAULTFD}"));
        return Ok(());
    }
    let kvm = debian.check("getent group kvm", SHORT)?;
    let number = kvm.trim().split(':').nth(2).unwrap_or_default();
    ensure!(
        number.parse::<u32>().is_ok(),
        "no number of the group in {kvm:?}"
    );
    let tried = debian.run(&format!("udevadm test {USERFAULTFD}"), SHORT)?;
    let said = format!("{}{}", tried.stdout, tried.stderr);
    for what in [format!("GROUP {number}"), "MODE 0660".to_owned()] {
        ensure!(
            our_rule_does(&said, &what),
            "our rule does not set {what} for userfaultfd: {said}"
        );
    }
    Ok(())
}

/// Returns whether one of our rules does this in the output of `udevadm test`, which also lists the
/// files read and the effects of other rules.
fn our_rule_does(said: &str, what: &str) -> bool {
    said.lines().any(|line| {
        let of_device = line.strip_prefix("userfaultfd: ");
        let place = of_device.and_then(|rest| rest.split_once("/60-ssi-hv.rules:"));
        let done = place.and_then(|(_, number_and_done)| number_and_done.split_once(' '));
        done.is_some_and(|(_, done)| done == what)
    })
}

/// Checks that the unit is valid and not enabled by default.
fn unit(context: &Context, debian: &Container) -> anyhow::Result<()> {
    let verified = debian.run(&format!("systemd-analyze verify {SERVICE}"), SHORT)?;
    ensure!(
        verified.status.success() && verified.stderr.trim().is_empty(),
        "systemd-analyze verify: {verified:?}"
    );
    let script =
        format!("systemd-analyze security --no-pager --threshold={EXPOSURE_MAX} {SERVICE}");
    let exposure = debian.check(&script, SHORT)?;
    let last = exposure.lines().last().unwrap_or_default();
    context.note(last.trim_start_matches(['\u{2192}', ' ']));
    let state = debian.run(
        &format!("systemctl is-enabled {SERVICE}; systemctl is-active {SERVICE}"),
        SHORT,
    )?;
    ensure!(
        state.stdout == "disabled\ninactive\n",
        "it is to wait for its administrator: {state:?}"
    );
    Ok(())
}

/// The service lends memory to a VM on this machine under its sandbox. An upgrade leaves it
/// running, and purging removes everything.
fn lends(context: &Context, debian: &Container, deb: &str) -> Result {
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port();
    let donor = format!("127.0.0.1:{port}");
    let configure = format!(
        "sed -i 's/^LISTEN=.*/LISTEN={donor}/; s/^MEMORY=.*/MEMORY=64M/' /etc/default/ssi-hv-node"
    );
    debian.check(&configure, SHORT)?;
    // The command returns when the node listens.
    debian.check(&format!("systemctl enable --now {SERVICE}"), SHORT)?;
    let pid = main_pid(debian)?;
    sandboxed(debian, &pid)?;
    let node = || -> anyhow::Result<Value> {
        let status = debian.check("ssi-hv status --json", SHORT)?;
        let status = Published::Status.parse(&status)?;
        let node = status["nodes"][0].clone();
        ensure!(
            node["listen"] == donor.as_str(),
            "root does not see the node: {status}"
        );
        Ok(node)
    };
    ensure!(node()?["leases_granted"] == 0);

    let verdict = if let Err(error) = tiny::kvm() {
        Verdict::Skip(format!(
            "installed and started, but no VM to lend to: {error}"
        ))
    } else {
        borrows(context, &donor)?;
        let lent = node()?;
        for counter in ["leases_granted", "pages_read", "pages_written"] {
            ensure!(lent[counter].as_u64() > Some(0), "{counter}: {lent}");
        }
        context.note(format!(
            "a VM read {} pages from the service and wrote {}",
            lent["pages_read"], lent["pages_written"]
        ));
        Verdict::Pass
    };

    debian.check(
        &format!("apt-get install -y --reinstall /package/{deb}"),
        APT_DEADLINE,
    )?;
    ensure!(
        pid == main_pid(debian)?,
        "an upgrade stopped the node, which guests may need"
    );
    ensure!(node()?["leases_granted"] == lent_leases(&verdict));

    protected(context, debian, &donor)?;

    let pid = main_pid(debian)?;
    debian.check("apt-get purge -y ssi-hv", APT_DEADLINE)?;
    let gone = format!(
        "[ ! -e /proc/{pid} ] && [ ! -e /run/ssi-hv-node ] && ! getent passwd ssi-hv-node && \
         ! getent group ssi-hv-node"
    );
    debian
        .check(&gone, SHORT)
        .context("the node outlives its package")?;
    let listing = format!("{LISTING} >/tmp/after; diff /tmp/before /tmp/after");
    let left = debian.run(&listing, SHORT)?;
    ensure!(
        left.status.success(),
        "purging leaves something: {}",
        left.stdout
    );
    Ok(verdict)
}

fn main_pid(debian: &Container) -> anyhow::Result<String> {
    let show = format!("systemctl show --value -p MainPID {SERVICE}");
    Ok(debian.check(&show, SHORT)?.trim().to_owned())
}

/// The service has a certificate, as docs/install.md says, lends to a VM that has one, and to no
/// other, and reads its files again.
fn protected(context: &Context, debian: &Container, donor: &str) -> anyhow::Result<()> {
    let product = context.product();
    // The container sees it as /package. It is new for each package.
    let dir = context.workspace.join("target/debian");
    let pki = |args: &[&str]| {
        let mut command = Command::new(&product);
        succeed_within(command.arg("pki").args(args).current_dir(&dir), SHORT)
    };
    pki(&["init", "authority", "--cluster", "prod"])?;
    pki(&["issue", "authority", "node/alpha", "-o", "alpha"])?;
    pki(&["issue", "authority", "vm/web", "-o", "web"])?;
    debian.check(
        "install -o ssi-hv-node -m 0600 /package/alpha/*.pem /etc/ssi-hv-node/ && \
         sed -i 's|^OPTIONS=.*|OPTIONS=\"--credentials /etc/ssi-hv-node\"|' /etc/default/ssi-hv-node",
        SHORT,
    )?;
    debian.check(&format!("systemctl restart {SERVICE}"), SHORT)?;
    let before = main_pid(debian)?;
    debian.check(&format!("systemctl reload {SERVICE}"), SHORT)?;
    ensure!(before == main_pid(debian)?, "a reload ended the node");
    let journal = format!("journalctl --sync && journalctl -q --no-pager -o cat -u {SERVICE}");
    let said = debian.check(&journal, SHORT)?;
    ensure!(
        said.contains("credentials and rules were read again"),
        "the node has not reloaded: {said}"
    );
    if let Err(error) = tiny::kvm() {
        context.note(format!("no VM with a certificate: {error}"));
        return Ok(());
    }
    let web = dir.join("web");
    let web = web.to_str().context("a directory that is no text")?;
    let named = format!("{donor},name=alpha");
    let file = context.artifacts.join("protected.json");
    let args = ["--donor", &named, "--credentials", web];
    tiny::run(&product, &args, &file, VM_DEADLINE)?;
    let without = tiny::run(&product, &["--donor", donor], &file, VM_DEADLINE);
    ensure!(without.is_err(), "a VM without a certificate has a lease");
    Ok(())
}

/// Returns how many leases the service has granted.
fn lent_leases(verdict: &Verdict) -> u64 {
    u64::from(*verdict == Verdict::Pass)
}

/// Checks that the service's process has a user of its own and only the privileges that it needs.
fn sandboxed(debian: &Container, pid: &str) -> anyhow::Result<()> {
    let status = debian.check(&format!("cat /proc/{pid}/status"), SHORT)?;
    let field = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.map(|rest| rest.trim_start_matches(':').trim().to_owned())
            .with_context(|| format!("no {name} in {status}"))
    };
    for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        ensure!(
            field(name)?.trim_start_matches('0').is_empty(),
            "{name} {}",
            field(name)?
        );
    }
    ensure!(
        field("NoNewPrivs")? == "1" && field("Seccomp")? == "2",
        "{status}"
    );
    let user = debian.check(&format!("stat -c %U:%G /proc/{pid}"), SHORT)?;
    ensure!(
        user.trim() == "ssi-hv-node:ssi-hv-node",
        "it runs as {user}"
    );
    let dir = debian.check("stat -c '%U %a' /run/ssi-hv-node", SHORT)?;
    ensure!(dir.trim() == "ssi-hv-node 700", "{dir}");
    let locked = debian.check(
        &format!("systemctl show --value -p LimitMEMLOCK {SERVICE}"),
        SHORT,
    )?;
    ensure!(locked.trim() == "infinity", "locked memory: {locked}");
    for limit in ["MemoryMax", "TasksMax", "LimitCORE"] {
        let show = format!("systemctl show --value -p {limit} {SERVICE}");
        let value = debian.check(&show, SHORT)?.trim().to_owned();
        let is_limited = value.parse::<u64>().is_ok_and(|bytes| bytes < 1 << 62);
        ensure!(is_limited, "{limit}: {value}");
    }
    let said = debian.check(
        &format!("journalctl -q --no-pager -o cat -p warning -u {SERVICE}"),
        SHORT,
    )?;
    ensure!(said.trim().is_empty(), "it complains: {said}");
    Ok(())
}

/// Runs a VM on this machine with most of its memory at the service, and verifies its contents.
fn borrows(context: &Context, donor: &str) -> anyhow::Result<()> {
    let file = context.artifacts.join("report.json");
    let report = tiny::run(&context.product(), &["--donor", donor], &file, VM_DEADLINE)?;
    let fetched = report["nodes"][1]["pages_fetched"].as_u64();
    ensure!(
        fetched > Some(1000),
        "it borrowed next to nothing: {fetched:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::our_rule_does;

    #[test]
    fn only_a_line_of_our_rule_counts() {
        // Output of systemd 252.
        let said = "Reading rules file: /usr/lib/udev/rules.d/60-ssi-hv.rules\n\
                    userfaultfd: /usr/lib/udev/rules.d/50-udev-default.rules:9 GROUP 6\n\
                    userfaultfd: /usr/lib/udev/rules.d/60-ssi-hv.rules:3 GROUP 108\n\
                    userfaultfd: Setting permissions /dev/userfaultfd, uid=0, gid=108, mode=0660\n";
        assert!(our_rule_does(said, "GROUP 108"));
        for other in ["GROUP 10", "GROUP 6", "GROUP ", "GROUP", "MODE 0660"] {
            assert!(!our_rule_does(said, other), "{other:?}");
        }
    }

    #[test]
    fn the_package_has_the_version_of_the_program() {
        let changelog = include_str!("../../../vmm/packaging/debian/changelog");
        let version = concat!("ssi-hv (", env!("CARGO_PKG_VERSION"), "-");
        assert!(changelog.starts_with(version), "{version} in {changelog}");
    }
}
