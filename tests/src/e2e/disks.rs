//! Scenarios of disks.

use anyhow::{Context as _, ensure};

use super::guest::{Donor, Finished, GUEST_DEADLINE, Guest, SHORT, exit};
use super::{Context, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "disks",
        about: "what a guest writes to a disk is in its image, from memory that is mostly remote",
        needs_product: true,
        run: disks,
    },
    Scenario {
        name: "disk_without_room",
        about: "a host that has no room is an I/O error in the guest, and one warning",
        needs_product: true,
        run: disk_without_room,
    },
    Scenario {
        name: "disk_block_device",
        about: "a block device is a disk, and is refused to a second VM",
        needs_product: true,
        run: disk_block_device,
    },
    Scenario {
        name: "disk_donor_away",
        about: "a disk's thread that waits for a lost donor goes on when it is back, or ends with the run",
        needs_product: true,
        run: disk_donor_away,
    },
];

const IMAGE: &str = "/tmp/disk.img";
const READ_ONLY: &str = "/tmp/readonly.img";
/// What is written and read back, and what is discarded behind it.
const PATTERN_MIB: u64 = 16;
const DISCARDED_MIB: u64 = 32;

/// Writes a pattern to the first disk while a probe has memory on the move, and reads it back
/// when nothing of it is cached any more; tries to write to the second; fills the first and
/// discards all but the pattern.
const WORK: &str = "faultprobe --bytes 96M & p=/tmp/pattern; \
    dd if=/dev/urandom of=$p bs=1M count=16; echo made=$(sha256sum <$p); \
    dd if=$p of=/dev/vda bs=1M conv=fsync; sync; echo 3 >/proc/sys/vm/drop_caches; \
    echo read=$(dd if=/dev/vda bs=1M count=16 | sha256sum); \
    echo also=$(sha256sum </dev/vdb); \
    echo ro $(cat /sys/block/vdb/ro) serial $(cat /sys/block/vda/serial) $(cat /sys/block/vdb/serial); \
    dd if=$p of=/dev/vdb bs=512 count=1 conv=fsync; echo refused=$?; \
    for at in 16 32; do dd if=$p of=/dev/vda bs=1M seek=$at conv=fsync; done; \
    blkdiscard -o 16777216 -l 33554432 /dev/vda; wait";

fn disks(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let make = format!(
        "rm -f {IMAGE}; truncate -s 64M {IMAGE}; dd if=/dev/urandom of={READ_ONLY} bs=1M count=4"
    );
    host.check(&["sh", "-c", &make], SHORT)?;
    let sum_of = |command: &str| -> anyhow::Result<String> {
        let text = host.check(&["sh", "-c", &format!("{command} | sha256sum")], SHORT)?;
        Ok(text
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned())
    };
    let untouched = sum_of(&format!("cat {READ_ONLY}"))?;

    let donor = Donor::start(context)?;
    let mut guest = Guest::remote(2, WORK);
    guest.cmdline.push_str(" ssi_modules=virtio_blk");
    guest.more.extend([
        "--disk",
        "path=/tmp/disk.img",
        "--disk",
        "path=/tmp/readonly.img,readonly",
    ]);
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(96 << 20)?;
    donor.stop(context)?;
    let console = &guest.output.stdout;
    let word = |name| word_after(console, name);
    let made = word("made=")?;
    ensure!(made.len() == 64, "no checksum: {made}");
    let read = word("read=")?;
    ensure!(read == made, "written {made}, read {read}");
    ensure!(word("also=")? == untouched, "the second disk reads wrong");
    ensure!(
        console.contains("ro 1 serial disk0 disk1"),
        "read-only state or serial numbers are wrong"
    );
    ensure!(word("refused=")? == "1", "a read-only disk was written");

    let in_image = sum_of(&format!("dd if={IMAGE} bs=1M count={PATTERN_MIB}"))?;
    ensure!(in_image == made, "written {made}, in the image {in_image}");
    let after = sum_of(&format!("cat {READ_ONLY}"))?;
    ensure!(after == untouched, "the read-only image has changed");
    let taken = host.check(&["stat", "-c", "%b", IMAGE], SHORT)?;
    let taken_mib = taken.trim().parse::<u64>()? / 2048;
    ensure!(
        (PATTERN_MIB..PATTERN_MIB + 2).contains(&taken_mib),
        "{taken_mib} MiB of the image are taken after {DISCARDED_MIB} MiB were discarded"
    );
    let remote = guest.number("/faults/remote/count")?;
    ensure!(remote > 0.0, "no remote fault");
    context.note(format!(
        "{PATTERN_MIB} MiB written and read back, {remote} remote faults meanwhile"
    ));
    Ok(Verdict::Pass)
}

fn disk_without_room(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let make = "mkdir -p /tmp/small && mount -t tmpfs -o size=8m small /tmp/small && \
        truncate -s 64M /tmp/small/disk.img";
    host.check(&["sh", "-c", make], SHORT)?;
    let mut guest = Guest::local(
        1,
        "dd if=/dev/urandom of=/dev/vda bs=1M count=16 conv=fsync; echo written=$?; \
         dd if=/dev/vda of=/dev/null bs=1M count=1; echo again=$?",
    );
    guest.cmdline.push_str(" ssi_modules=virtio_blk");
    guest.more.extend(["--disk", "path=/tmp/small/disk.img"]);
    let guest = guest.run(context);
    host.check(&["umount", "/tmp/small"], SHORT)?;
    let guest = guest?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let console = &guest.output.stdout;
    ensure!(console.contains("written=1"), "the write went well");
    ensure!(console.contains("again=0"), "the disk cannot be read");
    let errors = &guest.output.stderr;
    let warnings = errors.lines().filter(|l| l.contains("No space left"));
    ensure!(warnings.count() == 1, "not one warning: {errors}");
    Ok(Verdict::Pass)
}

/// The word that a guest printed last behind `name`, perhaps behind a message of the kernel, which
/// also prints its command line.
fn word_after<'a>(console: &'a str, name: &str) -> anyhow::Result<&'a str> {
    let rest = console.rsplit_once(name).map(|(_, rest)| rest);
    rest.and_then(|rest| rest.split_whitespace().next())
        .with_context(|| format!("the guest printed no {name:?}"))
}

fn disk_block_device(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let script = |text: &str| host.check(&["sh", "-c", text], SHORT);
    script("rm -f /tmp/device; truncate -s 32M /tmp/device")?;
    let argv = [
        "nbd-server",
        "127.0.0.1:10810",
        "/tmp/device",
        "-C",
        "/dev/null",
        "-d",
    ];
    let server = host.spawn(&argv)?;
    script("i=0; until ss -Hltn | grep -q :10810; do i=$((i+1)); [ $i -lt 100 ] || exit 1; sleep 0.1; done")
        .with_context(|| format!("nbd-server: {}", server.stderr()))?;
    script("nbd-client 127.0.0.1 10810 /dev/nbd0 -N '' -b 4096")?;

    let mut guest = Guest::local(
        1,
        "p=/tmp/p; dd if=/dev/urandom of=$p bs=1M count=8; echo made=$(sha256sum <$p); \
         echo size=$(blockdev --getsize64 /dev/vda); \
         dd if=$p of=/dev/vda bs=1M conv=fsync; echo written=$?; faultprobe --bytes 64M",
    );
    guest.cmdline.push_str(" ssi_modules=virtio_blk");
    guest.more.extend(["--disk", "path=/dev/nbd0"]);
    let process = guest.boot(context)?;
    let mut second = vec!["ssi-hv", "run", "--kernel", "/share/cloud-vmlinuz"];
    second.extend(["--disk", "path=/dev/nbd0"]);
    let second = host.run(&second, SHORT)?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    ensure!(
        second.status.code == exit::USAGE && second.stderr.contains("/dev/nbd0 is in use"),
        "a second VM: {}, {}",
        second.status,
        second.stderr
    );
    let console = &guest.output.stdout;
    let size = word_after(console, "size=")?;
    ensure!(size == (32 << 20).to_string(), "{size} bytes");
    ensure!(
        word_after(console, "written=")? == "0",
        "it cannot be written"
    );
    script("nbd-client -d /dev/nbd0")?;
    let stored = script("dd if=/tmp/device bs=1M count=8 | sha256sum")?;
    let made = word_after(console, "made=")?;
    ensure!(stored.starts_with(made), "written {made}, stored {stored}");
    drop(server);
    Ok(Verdict::Pass)
}

/// Writes a disk and reads it back again and again, while a probe has memory on the move.
const ROUNDS: &str = "p=/tmp/p; dd if=/dev/urandom of=$p bs=1M count=16; \
    echo made=$(sha256sum <$p); while :; do faultprobe --bytes 128M; done & \
    for i in $(seq 1 COUNT); do dd if=$p of=/dev/vda bs=1M conv=fsync 2>/dev/null; \
    echo 3 >/proc/sys/vm/drop_caches; echo round=$i read=$(sha256sum </dev/vda); done";

fn disk_donor_away(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let make = format!("rm -f {IMAGE}; truncate -s 16M {IMAGE}");
    host.check(&["sh", "-c", &make], SHORT)?;
    let donor = Donor::lending(context, "1G", &["--lease-seconds", "300"])?;
    let start = |rounds: &str| {
        let mut guest = Guest::remote(2, &ROUNDS.replace("COUNT", rounds));
        guest.cmdline.push_str(" ssi_modules=virtio_blk");
        guest.more.extend(["--donor-grace", "120"]);
        guest.more.extend(["--disk", "path=/tmp/disk.img"]);
        guest.boot(context)
    };

    let process = start("4")?;
    process.wait_for_line("round=1", GUEST_DEADLINE)?;
    context.testbed.cut_link(1, 2)?;
    let away = process.wait_for_line("the guest is paused", SHORT);
    context.testbed.restore_link(1, 2)?;
    away?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let console = &guest.output.stdout;
    let made = word_after(console, "made=")?;
    let wrong = console
        .split(" read=")
        .skip(1)
        .filter(|rest| !rest.starts_with('$') && !rest.starts_with(made));
    ensure!(wrong.count() == 0, "a round has read something else");
    ensure!(
        console.contains("round=4 read="),
        "not all rounds were made"
    );
    let errors = &guest.output.stderr;
    ensure!(
        errors.contains("is back"),
        "no outage was noticed: {errors}"
    );

    let process = start("1000")?;
    process.wait_for_line("round=1", GUEST_DEADLINE)?;
    context.testbed.cut_link(1, 2)?;
    let away = process.wait_for_line("the guest is paused", SHORT);
    process.kill(libc::SIGINT)?;
    let output = process.wait(SHORT);
    context.testbed.restore_link(1, 2)?;
    away?;
    let output = output.context("the run does not end on SIGINT while its donor is away")?;
    ensure!(
        output.status.code == exit::INTERRUPTED,
        "exit code {}: {}",
        output.status,
        output.stderr
    );
    donor.stop(context)?;
    Ok(Verdict::Pass)
}
