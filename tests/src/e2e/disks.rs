//! Scenarios of disks.

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, PAUSED, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "disks",
        about: "what a guest writes to a disk is in its image, from memory that is mostly remote",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: disks,
    },
    Scenario {
        name: "disk_without_room",
        about: "a host that has no room is an I/O error in the guest, and one warning",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: disk_without_room,
    },
    Scenario {
        name: "disk_block_device",
        about: "a block device is a disk, and is refused to a second VM",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: disk_block_device,
    },
    Scenario {
        name: "disk_donor_away",
        about: "a disk's thread that waits for a lost donor continues when it is back, or ends with the run",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: disk_donor_away,
    },
];

const IMAGE: &str = "/tmp/disk.img";
const READ_ONLY: &str = "/tmp/readonly.img";
/// Size of the pattern that is written and read back, and of the range after it that is discarded.
const PATTERN_MIB: u64 = 16;
const DISCARDED_MIB: u64 = 32;

/// Writes a pattern to the first disk while a probe moves memory, and reads it back after dropping
/// the caches. Tries to write to the second disk. Fills the first and discards everything except
/// the pattern.
const WORK: &str = "faultprobe --bytes 48M & p=/tmp/pattern; \
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
    let mut guest = Guest::small(2, WORK);
    guest.cmdline.push_str(" ssi_modules=virtio_blk");
    guest.more.extend([
        "--disk",
        "path=/tmp/disk.img",
        "--disk",
        "path=/tmp/readonly.img,readonly",
    ]);
    let guest = guest.run(context)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(48 << 20)?;
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

/// Returns the last word that the guest printed after `name`. The kernel also prints the command
/// line, and may print messages in between.
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
         dd if=$p of=/dev/vda bs=1M conv=fsync; echo written=$?; \
         blkdiscard -o 16777216 -l 8388608 /dev/vda; echo discarded=$?; faultprobe --bytes 64M",
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
    ensure!(
        word_after(console, "discarded=")? == "0",
        "it cannot be discarded"
    );
    script("nbd-client -d /dev/nbd0")?;
    let stored = script("dd if=/tmp/device bs=1M count=8 | sha256sum")?;
    let made = word_after(console, "made=")?;
    ensure!(stored.starts_with(made), "written {made}, stored {stored}");
    drop(server);
    Ok(Verdict::Pass)
}

/// Writes a disk and reads it back repeatedly while a probe moves memory.
const ROUNDS: &str = "p=/tmp/p; dd if=/dev/urandom of=$p bs=1M count=8; \
    echo made=$(sha256sum <$p); while :; do faultprobe --bytes 64M; done & \
    for i in $(seq 1000); do dd if=$p of=/dev/vda bs=1M conv=fsync 2>/dev/null; \
    echo 3 >/proc/sys/vm/drop_caches; echo round=$i read=$(sha256sum </dev/vda); done";

/// Returns how many rounds of a guest have ended; each must have read what was written.
fn rounds_of(console: &str) -> anyhow::Result<u64> {
    let made = word_after(console, "made=")?;
    let mut rounds = 0;
    // The last line may be incomplete.
    let (whole, _) = console.rsplit_once('\n').context("no line")?;
    for line in whole.lines() {
        let Some((_, round)) = line.split_once("round=") else {
            continue;
        };
        let (number, read) = round.split_once(" read=").context("no checksum")?;
        ensure!(
            read.starts_with(made),
            "round {number}: {made} written, {read} read"
        );
        rounds = number.parse()?;
    }
    Ok(rounds)
}

fn disk_donor_away(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let make = format!("rm -f {IMAGE}; truncate -s 8M {IMAGE}");
    host.check(&["sh", "-c", &make], SHORT)?;
    let donor = Donor::lending(context, "1G", &["--lease-seconds", "300"])?;
    let mut guest = Guest::small(2, ROUNDS);
    guest.cmdline.push_str(" ssi_modules=virtio_blk");
    guest.more.extend(["--donor-grace", "120"]);
    guest.more.extend(["--disk", "path=/tmp/disk.img"]);
    let process = guest.boot(context)?;
    process.wait_for_line("round=1 ", GUEST_DEADLINE)?;

    context.testbed.cut_link(1, 2)?;
    let away = process.wait_for_line(PAUSED, SHORT);
    context.testbed.restore_link(1, 2)?;
    away?;
    process.wait_for_line("is back", GUEST_DEADLINE)?;
    let rounds = rounds_of(&process.stdout())?;
    // One round may have been about to end when the donor disappeared.
    process.wait_for_line(&format!("round={} ", rounds + 2), GUEST_DEADLINE)?;
    rounds_of(&process.stdout())?;

    let errors = process.stderr();
    let outages = errors.lines().filter(|line| line.contains(PAUSED)).count();
    context.testbed.cut_link(1, 2)?;
    let away = process.wait_for_nth_line(PAUSED, outages, SHORT);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_are_counted_and_one_that_read_wrong_is_an_error() {
        let console = "made=ab -\r\nround=1 read=ab -\r\nround=2 read=ab -\r\nround=3 rea";
        assert_eq!(rounds_of(console).unwrap(), 2);
        assert_eq!(rounds_of("made=ab -\r\n").unwrap(), 0);
        let wrong = "made=ab -\r\nround=1 read=cd -\r\n";
        let error = rounds_of(wrong).unwrap_err().to_string();
        assert!(error.contains("round 1: ab written, cd"), "{error}");
    }
}
