//! The emulator's command line.
//!
//! The emulation of nested SVM has defects, and these options are the ones under which it was found
//! stable: one CPU, no virtual GIF, and a periodic tick in the host (`nohz=off highres=off`), which
//! raises a lost interrupt again. A starting kernel tests that tick (`IO-APIC + timer doesn't work!`),
//! and panics where the emulator gets no CPU time for that moment; `no_timer_check` omits the test.
//!
//! With two CPUs a host hung, or a guest crashed or lost its timer, once in 25 starts of a guest;
//! with one, never in 100. One cause was observed in a hung host: creating the first VM and
//! destroying the last one makes Linux patch its own code (static keys of the scheduler), and an
//! emulator that translates code on one CPU while another patches it may keep the old code (QEMU
//! before 8.1). One CPU hides races from the scenarios, so races are tested natively.

use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};

use super::{HostImage, TestbedConfig};

/// Returns a port on 127.0.0.1 that was free at the time of the call.
pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port())
}

/// The processor of the hosts. AVX2 would make AES up to five times as slow: after instructions of
/// 256 bits, such as a copy has, QEMU leaves the upper halves of this machine's registers in use
/// until it next leaves translated code, and its helpers for AES use SSE, which is slow meanwhile.
const CPU: &str = "max,+svm,-vgif,-avx2";

/// Returns the command that runs host `number`.
pub fn command(
    number: usize,
    config: &TestbedConfig,
    image: &HostImage,
    run_dir: &Path,
    port: u16,
    console: &Path,
) -> Command {
    let mut command = Command::new("qemu-system-x86_64");
    command
        .args(["-name", &format!("ssi-hv-host{number}")])
        .args(["-accel", "tcg,thread=multi", "-cpu", CPU])
        .args(["-smp", &config.cpus.to_string()])
        .args(["-m", &config.memory_mib.to_string()])
        .args(["-display", "none", "-nodefaults", "-no-reboot"])
        .args(["-serial", &format!("file:{}", escape(console))])
        .arg("-kernel")
        .arg(&image.kernel)
        .arg("-initrd")
        .arg(&image.initrd)
        .args(["-append", &kernel_parameters(number, config)])
        .args(["-virtfs", &share(&config.share)])
        .args(["-netdev", &way_in(port)])
        .args([
            "-device",
            &format!("virtio-net-pci,netdev=agent,mac=52:54:00:ff:00:{number:02}"),
        ]);
    for peer in (1..=config.hosts).filter(|peer| *peer != number) {
        let id = format!("link{peer}");
        command
            .args(["-netdev", &link(&id, number, peer, run_dir)])
            .args([
                "-device",
                &format!("virtio-net-pci,netdev={id},mac=52:54:00:10:{peer:02}:{number:02}"),
            ]);
    }
    if let Some(disk) = config.disk.as_deref().filter(|_| number == 1) {
        command
            .args(["-drive", &drive(disk)])
            .args(["-device", "virtio-blk-pci,drive=disk"]);
    }
    command.stdin(Stdio::null()).stdout(Stdio::null());
    command
}

fn kernel_parameters(number: usize, config: &TestbedConfig) -> String {
    format!(
        "console=ttyS0 quiet panic=-1 mitigations=off nokaslr nohz=off highres=off \
         no_timer_check ssi_host={number} ssi_hosts={} ssi_mtu={}",
        config.hosts, config.mtu
    )
}

fn share(path: &Path) -> String {
    format!(
        "local,path={},mount_tag=share,security_model=none,readonly=on",
        escape(path)
    )
}

/// `snapshot=on`: writes go to a temporary file of the emulator.
fn drive(path: &Path) -> String {
    format!(
        "id=disk,if=none,format=raw,snapshot=on,file={}",
        escape(path)
    )
}

/// `restrict=on`: the host reaches no other network over this card.
fn way_in(port: u16) -> String {
    format!("user,id=agent,restrict=on,hostfwd=tcp:127.0.0.1:{port}-10.0.2.15:7000")
}

fn link(id: &str, number: usize, peer: usize, run_dir: &Path) -> String {
    let socket = |from: usize, to: usize| escape(&run_dir.join(format!("{from}-{to}")));
    format!(
        "dgram,id={id},local.type=unix,local.path={},remote.type=unix,remote.path={}",
        socket(number, peer),
        socket(peer, number)
    )
}

/// QEMU's option parser reads a doubled comma as one comma.
fn escape(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ends_of_a_link_name_the_same_sockets() {
        let dir = Path::new("/r");
        assert!(
            link("link2", 1, 2, dir)
                .ends_with("local.path=/r/1-2,remote.type=unix,remote.path=/r/2-1")
        );
        assert!(
            link("link1", 2, 1, dir)
                .ends_with("local.path=/r/2-1,remote.type=unix,remote.path=/r/1-2")
        );
    }

    #[test]
    fn a_comma_in_a_path_is_no_option() {
        assert!(share(Path::new("/a,readonly=off")).contains("/a,,readonly=off,mount_tag"));
    }
}
