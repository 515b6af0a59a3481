//! A working set that one guest records and the next one replays, by the command line.

use anyhow::{Context as _, ensure};

use super::donor::Donor;
use super::guest::{BOOT_DEADLINE, Finished, Guest, SHORT, exit};
use super::{Context, Hosts, Result, Scenario, Verdict};

const PROBE: &str = "faultprobe --bytes 48M";
const PROBE_BYTES: u64 = 48 << 20;
/// More local memory than these guests touch: an evicted page of zeroes would be untouched again.
const LOCAL: &str = "256M";
/// Where the working set is recorded.
const RECORDED: &str = "/tmp/recorded";
/// Header and checksum of a working set without runs.
const EMPTY_BYTES: u64 = 52;
/// Pages that a replay fills at least: a kernel has used a multiple when its init starts.
const REPLAYED_MIN: f64 = 4096.0;

/// Files that are no working set of the guest, by a command that makes each from the recorded one;
/// and what is said of them.
const UNFIT: [(&str, &str, &str); 4] = [
    (
        "/tmp/not-one",
        "cp /share/cloud-vmlinuz $file",
        "is ignored: not a working set",
    ),
    (
        "/tmp/damaged",
        "cp $from $file && printf x | dd of=$file bs=1 seek=60 conv=notrunc",
        ": it is damaged",
    ),
    (
        "/tmp/other-version",
        "cp $from $file && printf '\\011' | dd of=$file bs=1 seek=8 conv=notrunc",
        "is ignored: a working set of version 9, 1 is known; record it again",
    ),
    (
        "/tmp/absent",
        "rm -f $file",
        "is ignored: cannot read /tmp/absent: No such file",
    ),
];

pub(super) const SCENARIOS: &[Scenario] = &[Scenario {
    name: "working_set",
    about: "the pages that one guest touched are ready in the next one, which finds every byte right; \
            other files are refused by name",
    needs_product: true,
    hosts: Hosts::TWO_6_12,
    run: working_set,
}];

fn working_set(context: &Context<'_>) -> Result {
    let host = context.testbed.host(1);
    let donor = Donor::start(context)?;
    let running = |exec: &str, flag: &'static str, file: &'static str| {
        let mut guest = Guest {
            local_memory: Some(LOCAL),
            ..Guest::remote(1, exec)
        };
        guest.more.extend([flag, file]);
        guest
    };
    let with = |flag, file| running(PROBE, flag, file);
    host.check(&["rm", "-f", RECORDED], SHORT)?;
    let first = with("--record-working-set", RECORDED).run(context)?;
    check(&first, |replayed| replayed == 0.0)?;
    let size = host.check(&["stat", "-c", "%s", RECORDED], SHORT)?;
    let size: u64 = size.trim().parse()?;
    ensure!(size > EMPTY_BYTES, "the working set has {size} bytes");

    let second = with("--replay-working-set", RECORDED).run(context)?;
    check(&second, |replayed| replayed >= REPLAYED_MIN)?;
    let ignored = second.output.stderr.contains("is ignored");
    ensure!(!ignored, "{}", second.output.stderr);
    let zero_faults = |guest: &Finished| guest.number("/faults/zero/count");
    let (before, after) = (zero_faults(&first)?, zero_faults(&second)?);
    context.note(format!(
        "{size} bytes of working set; {} pages replayed, after which {after} faults were on untouched \
         pages instead of {before}; init after {:.0} ms instead of {:.0} (emulated)",
        second.number("/prefetch/replayed")?,
        second.number("/boot/to_init_ms")?,
        first.number("/boot/to_init_ms")?,
    ));
    ensure!(
        after * 2.0 <= before,
        "{after} faults on untouched pages with a replay, {before} without"
    );

    // Without its last bytes it is of no use, and harms nobody.
    let cut = format!("head -c {} {RECORDED} >/tmp/cut", size - 3);
    host.check(&["sh", "-c", &cut], SHORT)?;
    let third = with("--replay-working-set", "/tmp/cut").run(context)?;
    check(&third, |replayed| replayed == 0.0)?;
    let due = format!(
        "--replay-working-set /tmp/cut is ignored: {} bytes, {size} expected: cut short, or no working set",
        size - 3
    );
    ensure!(
        third.output.stderr.contains(&due),
        "{}",
        third.output.stderr
    );

    // These guests show their kernel's messages, so that they can be ended as soon as they have
    // begun.
    let replaying = |file| running("", "--replay-working-set", file);
    for (file, script, due) in UNFIT {
        let script = format!("from={RECORDED}; file={file}; {script}");
        host.check(&["sh", "-c", &script], SHORT)?;
        is_ignored(context, &replaying(file), due)?;
    }
    let smaller = Guest {
        memory: "288M",
        ..replaying(RECORDED)
    };
    let due = "is ignored: recorded for another size of guest memory; record it again";
    is_ignored(context, &smaller, due)?;
    let other = Guest {
        kernel: "full-vmlinuz",
        initrd: "guest-full.cpio",
        ..replaying(RECORDED)
    };
    let due = "is ignored: recorded for another kernel or initial RAM disk; record it again";
    is_ignored(context, &other, due)?;
    donor.stop(context)?;
    Ok(Verdict::Pass)
}

/// Checks that a guest ended well with every byte right, and how many pages were replayed.
fn check(guest: &Finished, is_right: impl Fn(f64) -> bool) -> anyhow::Result<()> {
    guest.expect_exit(exit::SHUTDOWN)?;
    guest.faultprobe_over(PROBE_BYTES)?;
    let replayed = guest.number("/prefetch/replayed")?;
    ensure!(is_right(replayed), "{replayed} pages were replayed");
    Ok(())
}

/// Starts a guest whose working set is of no use, and checks the warning and that it starts
/// without.
fn is_ignored(context: &Context<'_>, guest: &Guest, due: &str) -> anyhow::Result<()> {
    let process = guest.start(context)?;
    process
        .wait_for_line(due, SHORT)
        .with_context(|| format!("a warning with {due:?}"))?;
    process.wait_for_line("Linux version", BOOT_DEADLINE)?;
    process.kill(libc::SIGINT)?;
    Finished::read(context, process.wait(SHORT)?)?.expect_exit(exit::INTERRUPTED)
}
