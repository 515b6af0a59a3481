//! A guest whose devices are used by the CPU of another host.

use anyhow::{Context as _, ensure};

use super::{CLOUD, DEADLINE, Layout, QUIET, TWO, cpu_of, end, said};
use crate::e2e::control::resize;
use crate::e2e::guest::{Finished, SHORT, reach_end};
use crate::e2e::{Context, Result, Verdict};

const USES: Layout = Layout {
    modules: "module_blacklist=pvpanic_mmio init_on_alloc=0 \
        ssi_modules=\"virtio_blk virtio_net virtio_console vmw_vsock_virtio_transport\"",
    more: &[
        "--name",
        "devices",
        "--disk",
        "path=/tmp/disk.img",
        "--net",
        "tap=tap0,mac=02:00:00:00:77:02",
        "--vsock",
        "cid=3,path=/tmp/vm.vsock",
        "--hvc",
        "/tmp/vm.hvc",
    ],
    ..TWO
};

/// The shell and its programs run on CPU 1, which gets the interrupts of all devices as well.
const WORK: &str = "taskset -p 2 $$; for i in /proc/irq/[0-9]*/smp_affinity; do echo 2 >$i; done 2>/dev/null; \
    p=/tmp/p; dd if=/dev/urandom of=$p bs=64k count=2; echo made=$(sha256sum <$p); \
    dd if=$p of=/dev/vda bs=64k conv=fsync; echo 3 >/proc/sys/vm/drop_caches; \
    echo read=$(dd if=/dev/vda bs=64k count=2 | sha256sum); \
    ip addr add 192.168.77.2/24 dev eth0; ip link set eth0 up; ping -c 3 192.168.77.1; echo pinged=$?; \
    socket-pipe tcp-connect 192.168.77.1:9000 <$p >/tmp/n; echo net=$(sha256sum </tmp/n); \
    socket-pipe vsock-connect 9000 <$p >/tmp/v; echo vsock=$(sha256sum </tmp/v); \
    exec 9<>/dev/hvc0; stty raw -echo <&9; seq 1 100 >&9; echo raw=$?; head -c 1024 <&9 >/tmp/h; \
    echo hvc=$(sha256sum </tmp/h); grep virtio /proc/interrupts; read x </proc/self/stat; echo stat $x";

/// What the host prepares, and what it has at the end.
const PREPARE: &str = "rm -f /tmp/vm.* /tmp/disk.img /tmp/from-*; truncate -s 16M /tmp/disk.img; \
    dd if=/dev/urandom of=/tmp/to-guest bs=64k count=2; \
    ip tuntap add dev tap0 mode tap && ip addr add 192.168.77.1/24 dev tap0 && ip link set tap0 up";
/// Programs at the other ends of the guest's connections.
const LISTENERS: [&str; 2] = [
    "/share/socket-pipe tcp-listen 192.168.77.1:9000 </tmp/to-guest | sha256sum",
    "/share/socket-pipe unix-listen /tmp/vm.vsock_9000 </tmp/to-guest | sha256sum",
];
/// Types into the guest's second console, and reads to the end of what it shows.
const TERMINAL: &str =
    "head -c 1024 /tmp/to-guest | /share/socket-pipe unix-connect /tmp/vm.hvc | sha256sum";
/// Size of the balloon for a while.
const BALLOON_BYTES: u64 = 16 << 20;
/// Devices that interrupt: disk, network card, socket device, console and balloon.
const DEVICES: usize = 5;

pub(super) fn used_from_afar(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let script = |text: &str| host.check(&["sh", "-c", text], SHORT);
    script(PREPARE)?;
    let listeners = LISTENERS.map(|listener| host.spawn(&["sh", "-c", listener]));
    let nodes = USES.nodes(context)?;
    let exec = format!("{QUIET}; {WORK}");
    let process = USES.guest(CLOUD, &exec).start(context)?;
    let raw = process.wait_for_line("raw=0", DEADLINE);
    raw.with_context(|| said(&process, &nodes))?;
    let socket = format!("vm-{}-devices", process.pid());
    for bytes in [BALLOON_BYTES, 0] {
        resize(context, &socket, bytes).with_context(|| said(&process, &nodes))?;
    }
    let terminal = host.spawn(&["sh", "-c", TERMINAL])?;
    let output = reach_end(context, &process, DEADLINE);
    let output = output.with_context(|| said(&process, &nodes))?;
    let guest = Finished::read(context, output)?;
    script("ip link delete tap0")?;
    USES.check(&guest)?;
    end(context, nodes)?;

    let console = &guest.output.stdout;
    let word = |name: &str| {
        // The kernel prints its command line first.
        let rest = console.rsplit_once(name).map(|(_, rest)| rest);
        rest.and_then(|rest| rest.split_whitespace().next())
            .with_context(|| format!("the guest printed no {name:?}: {console}"))
    };
    let sum = |command: &str| Ok::<_, anyhow::Error>(first_word(&script(command)?).to_owned());
    ensure!(cpu_of(console) == Some(1), "console: {console}");
    ensure!(word("pinged=")? == "0", "the guest cannot ping its host");
    let made = word("made=")?;
    ensure!(word("read=")? == made, "the disk gave other bytes back");
    let on_disk = sum("head -c 131072 /tmp/disk.img | sha256sum")?;
    ensure!(
        on_disk == made,
        "made {made}, the disk's image has {on_disk}"
    );
    let given = sum("sha256sum </tmp/to-guest")?;
    for (listener, name) in listeners.into_iter().zip(["net=", "vsock="]) {
        let heard = listener?.wait(SHORT)?.stdout;
        ensure!(
            first_word(&heard) == made,
            "{name}: made {made}, heard {heard}"
        );
        let got = word(name)?;
        ensure!(got == given, "{name}: given {given}, the guest got {got}");
    }
    let typed = sum("head -c 1024 /tmp/to-guest | sha256sum")?;
    let read = word("hvc=")?;
    ensure!(read == typed, "typed {typed}, hvc0 gave {read}");
    let seen = terminal.wait(SHORT)?.stdout;
    let due = sum("seq 1 100 | sha256sum")?;
    ensure!(
        first_word(&seen) == due,
        "hvc0 showed {seen}, not what was written"
    );
    let interrupts = interrupts_of(console, 1);
    ensure!(
        interrupts.iter().filter(|count| **count > 0).count() >= DEVICES,
        "interrupts of devices at CPU 1: {interrupts:?}: {console}"
    );
    context.note(format!(
        "disk, network, sockets, console and balloon from the other host's CPU, with {interrupts:?} \
         interrupts there (emulated)"
    ));
    Ok(Verdict::Pass)
}

fn first_word(text: &str) -> &str {
    text.split_whitespace().next().unwrap_or_default()
}

/// How many interrupts of each virtio device a CPU had, from the guest's `/proc/interrupts`.
fn interrupts_of(console: &str, cpu: usize) -> Vec<u64> {
    let counts = console.lines().filter_map(|line| {
        let (_, counts) = line.split_once(':')?;
        let name = line.split_whitespace().last()?;
        let count = counts.split_whitespace().nth(cpu)?.parse();
        name.starts_with("virtio").then(|| count.ok()).flatten()
    });
    counts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupts_are_counted_for_one_cpu() {
        let console = "IRQ: 1\r\n 25:   10    3  IO-APIC   5-edge   virtio0\r\n\
            \u{20}26:   0    0  IO-APIC   6-edge   virtio1\r\n 4:  9  9  IO-APIC 4-edge ttyS0\r\n";
        assert_eq!(interrupts_of(console, 1), [3, 0]);
        assert_eq!(interrupts_of(console, 0), [10, 0]);
    }
}
