//! QEMU as a monitor on the hosts of the testbed, whose processors and userfaultfd it uses as the
//! product does.
//!
//! It is that of Debian's backports: until 7.2, the version of Debian 12, QEMU answers requests for
//! pages only within the rate limit of the background stream, and one stream at full speed leaves
//! no requests to measure. From 8.0 on, with the capability `postcopy-preempt`, the thread that
//! receives a request sends the page, over a connection of its own.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use kernel_images::unpacked::{self, Unpacked};
use kernel_images::{ImageCache, Manifest};

use super::swap_guest;
use crate::share::{self, Share};
use crate::testbed::{self, Host, RemoteProcess, Tap};

/// The packages; those that they depend on are those of `qemu-system-x86` on this machine.
const PACKAGES: &[&str] = &["qemu-system-x86", "qemu-system-data", "seabios"];
/// What QEMU loads for a PC with a kernel and without cards: each with its directory.
const FIRMWARE: &[(&str, &str)] = &[
    ("usr/share/seabios", "bios-256k.bin"),
    ("usr/share/qemu", "kvmvapic.bin"),
    ("usr/share/qemu", "linuxboot_dma.bin"),
];
const PROGRAM: &str = "qemu-system-x86_64";
/// Its directory below that which hosts share.
const DIR: &str = "qemu";
/// Deadline of a few commands to QEMU.
const COMMAND_DEADLINE: Duration = Duration::from_secs(90);

/// Puts QEMU, its libraries and its firmware into the shared directory, and returns its version.
pub(super) fn prepare(workspace: &Path, share: &Share) -> anyhow::Result<String> {
    let cache = ImageCache::open(&workspace.join("target/images"))?;
    let manifest = Manifest::built_in()?;
    let newer = manifest.kernel("backports")?;
    let suite = newer.suite.as_deref().context("a suite of backports")?;
    let qemu = unpacked::ensure(&cache.root().join("qemu"), suite, PACKAGES)
        .with_context(|| format!("QEMU of {suite}, to compare with its post-copy"))?;
    install(&qemu, &share.dir.join(DIR))?;
    let version = qemu.packages.first().map(|p| p.version.clone());
    version.context("a version of QEMU")
}

fn install(qemu: &Unpacked, to: &Path) -> anyhow::Result<()> {
    let libraries = to.join("lib");
    std::fs::create_dir_all(&libraries).with_context(|| libraries.display().to_string())?;
    let program = qemu.root.join("usr/bin").join(PROGRAM);
    let mut files = vec![(program.clone(), to.join(PROGRAM))];
    for (dir, name) in FIRMWARE {
        files.push((qemu.root.join(dir).join(name), to.join(name)));
    }
    for library in testbed::needed(&program)? {
        let name = library.file_name().context("a library without a name")?;
        files.push((library.clone(), libraries.join(name)));
    }
    for (from, to) in files {
        share::install(&from, &to)?;
    }
    Ok(())
}

/// A QEMU on a host.
#[derive(Debug)]
pub(super) struct Qemu<'a> {
    host: &'a Host,
    name: &'static str,
    process: RemoteProcess,
}

impl<'a> Qemu<'a> {
    /// Starts a guest with the kernel and the initramfs of all sides, which runs `work`. `more` are
    /// further options.
    pub(super) fn start(
        host: &'a Host,
        name: &'static str,
        memory_mib: u64,
        work: &str,
        more: &str,
        tap: Tap,
    ) -> anyhow::Result<Self> {
        let (socket, input) = (socket(name), input(name));
        // The console's input stays open, since this end of the pipe can also write. XSAVE is
        // hidden as by the product: the testbed's processors get it wrong for guests.
        let script = format!(
            "set -e
            rm -f {socket} {input}
            mkfifo {input}
            exec env LD_LIBRARY_PATH=/share/{DIR}/lib /share/{DIR}/{PROGRAM} -L /share/{DIR} \
            -M pc -accel kvm -cpu host,-xsave -smp 1 -m {memory_mib} \
            -nodefaults -no-user-config -display none -no-reboot \
            -kernel /share/cloud-vmlinuz -initrd /share/{} \
            -append 'console=ttyS0 ssi_exec=\"/bin/swap-guest {work}\"' \
            -serial stdio -qmp unix:{socket},server=on,wait=off {more} <>{input}",
            swap_guest::INITRAMFS
        );
        let process = host
            .spawn_with(&["sh", "-c", &script], &[], tap)
            .with_context(|| format!("QEMU ({name})"))?;
        Ok(Self {
            host,
            name,
            process,
        })
    }

    /// Its process, whose standard output is the guest's console.
    pub(super) fn process(&self) -> &RemoteProcess {
        &self.process
    }

    /// Waits until it can be controlled.
    pub(super) fn wait_ready(&self) -> anyhow::Result<()> {
        let script = format!(
            "i=0; until [ -S {} ]; do
                i=$((i+1)); [ $i -lt 300 ] && [ -e /proc/{} ] || exit 1; sleep 0.1
            done",
            socket(self.name),
            self.process.pid()
        );
        let ready = self.host.check(&["sh", "-c", &script], COMMAND_DEADLINE);
        ready.map(drop).with_context(|| {
            let (name, error) = (self.name, self.process.stderr());
            format!("QEMU ({name}) did not start on its host, whose /dev/kvm it needs: {error}")
        })
    }

    /// Takes steps through QMP (see the program `qmp`), and returns a line for each.
    pub(super) fn control(&self, steps: &[String]) -> anyhow::Result<Vec<String>> {
        let socket = socket(self.name);
        let mut argv = vec!["/share/qmp", &socket];
        argv.extend(steps.iter().map(String::as_str));
        let output = self.host.check(&argv, COMMAND_DEADLINE);
        let output = output.with_context(|| self.refused())?;
        Ok(output.lines().map(str::to_owned).collect())
    }

    /// Takes steps without waiting for their end, after which the guest's console gets a line.
    pub(super) fn control_then_line(&self, steps: &[String]) -> anyhow::Result<RemoteProcess> {
        let (socket, input) = (socket(self.name), input(self.name));
        let script = format!("/share/qmp {socket} \"$@\" && echo >{input}");
        let mut argv = vec!["sh", "-c", &script, "qmp"];
        argv.extend(steps.iter().map(String::as_str));
        Ok(self.host.spawn(&argv)?)
    }

    /// Waits for the end of such steps.
    pub(super) fn wait_for_control(&self, steps: &RemoteProcess) -> anyhow::Result<()> {
        let output = steps.wait(COMMAND_DEADLINE)?;
        ensure!(
            output.status.code == 0,
            "{}: {}",
            self.refused(),
            output.stderr.trim()
        );
        Ok(())
    }

    fn refused(&self) -> String {
        let (name, error) = (self.name, self.process.stderr());
        format!(
            "QEMU ({name}) did not do as told; it wrote {:?}",
            error.trim()
        )
    }
}

fn socket(name: &str) -> String {
    format!("/tmp/qemu-{name}.sock")
}

fn input(name: &str) -> String {
    format!("/tmp/qemu-{name}.in")
}
