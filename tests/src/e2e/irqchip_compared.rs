//! Scenarios that compare interrupt controllers: those of KVM, those in user space, and those of
//! KVM with halted vCPUs that keep their CPUs. They run by name only, since they decide nothing that
//! changes from commit to commit; docs/bench.md has their results.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use super::donor::Donor;
use super::guest::{Finished, GUEST_DEADLINE, Guest, exit, faultprobes};
use super::rdma::processor_ticks;
use super::{Context, Hosts, Result, Scenario, Verdict, reads};

/// Alternating rounds. Each value is printed.
const ROUNDS: usize = 2;
/// Some 2,000 remote faults, then sleeps, then nothing at all. The kernel may print its command line,
/// which must not have the markers themselves.
const WORK: &str = "faultprobe --bytes 112M --kinds 96M </dev/null; faultprobe --timers; \
    echo IDLE-$((0)); sleep 10; echo IDLE-$((1))";
/// What two vCPUs do to each other.
const BETWEEN_CPUS: &str = "faultprobe --ssi --seconds 12";
/// Ticks of a host's clock in a second.
const TICKS_PER_SECOND: f64 = 100.0;

pub(super) const LONG: &[Scenario] = &[
    Scenario {
        name: "irqchip_compared",
        about: "latency of faults and timers, CPU time of an idle guest, interrupts between vCPUs, by controller",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: irqchip_compared,
    },
    Scenario {
        name: "dedicated_cpus",
        about: "a guest on a dedicated CPU that reads has nothing written back",
        needs_product: true,
        hosts: Hosts::TWO_6_12,
        run: |context| reads::on(context, DEDICATED),
    },
    Scenario {
        name: "dedicated_cpus_old_kernel",
        about: "the same on the older kernel",
        needs_product: true,
        hosts: Hosts::TWO_6_1,
        run: |context| reads::on(context, DEDICATED),
    },
];

/// A host has one CPU, so the pager shares it.
const DEDICATED: &[&str] = &["--dedicated-cpus", "--cpu-pinning", "0"];

/// A set of controllers, by its flags.
const CONTROLLERS: [(&str, &[&str]); 3] = [
    ("kernel", &["--irqchip", "kernel"]),
    ("user", &["--irqchip", "user"]),
    ("kernel, dedicated CPU", DEDICATED),
];

fn irqchip_compared(context: &Context<'_>) -> Result {
    let donor = Donor::start(context)?;
    for round in 1..=ROUNDS {
        for (name, flags) in CONTROLLERS {
            let measured = measure(context, flags)
                .with_context(|| format!("round {round}, controllers: {name}"))?;
            context.note(format!("round {round}, {name}: {measured}"));
        }
    }
    // A dedicated CPU for each of two vCPUs takes a host with two.
    for (name, flags) in &CONTROLLERS[..2] {
        let mut guest = Guest::local(2, BETWEEN_CPUS);
        guest.more.extend(*flags);
        let guest = guest.run(context)?;
        guest.expect_exit(exit::SHUTDOWN)?;
        let probe = guest.faultprobe_over(0)?;
        let of = |kind: &str| {
            let pair = &probe["ssi"][kind][0]["latency_us"];
            number(pair, "p50").with_context(|| format!("no {kind} in {probe}"))
        };
        context.note(format!(
            "{name}, 2 vCPUs: p50 of a wake-up {:.0} us, of a call {:.0} us",
            of("wakes")?,
            of("calls")?
        ));
    }
    donor.stop(context)?;
    Ok(Verdict::Pass)
}

/// What one guest measured.
struct Measured {
    guest_us: f64,
    pager_us: f64,
    late_us: [f64; 2],
    idle_percent: f64,
    pages: [f64; 2],
}

impl std::fmt::Display for Measured {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let ([p50, p99], [fetched, written]) = (self.late_us, self.pages);
        write!(
            f,
            "p50 of a remote fault {:.0} us in the guest, {:.0} us in the pager; a sleep ends {p50:.0} us late \
             (p99 {p99:.0}); idle, {:.1} % of a CPU; {fetched} pages fetched, {written} written back (emulated)",
            self.guest_us, self.pager_us, self.idle_percent
        )
    }
}

fn measure(context: &Context<'_>, flags: &[&'static str]) -> anyhow::Result<Measured> {
    let mut guest = Guest::small(1, WORK);
    guest.more.extend(flags);
    let process = guest.boot(context)?;
    let host = context.testbed.host(1);
    let at = |marker: &str| -> anyhow::Result<(Instant, u64)> {
        process.wait_for_line(marker, GUEST_DEADLINE)?;
        Ok((Instant::now(), processor_ticks(host, process.pid())?))
    };
    let (begin, before) = at("IDLE-0")?;
    let (end, after) = at("IDLE-1")?;
    let guest = Finished::read(context, process.wait(GUEST_DEADLINE)?)?;
    guest.expect_exit(exit::SHUTDOWN)?;
    let dedicated = flags.contains(&"--dedicated-cpus");
    ensure!(
        guest.report["guest"]["dedicated_cpus"] == dedicated,
        "report: {}",
        guest.report["guest"]
    );
    let probes = faultprobes(&guest.output.stdout)?;
    let [kinds, timers] = <[Value; 2]>::try_from(probes)
        .map_err(|probes| anyhow::anyhow!("two probes were due: {probes:?}"))?;
    ensure!(kinds["corrupt_bytes"] == 0, "corrupt bytes: {kinds}");
    let seconds = (end - begin).as_secs_f64();
    let ticks = u32::try_from(after.saturating_sub(before))?;
    Ok(Measured {
        guest_us: number(&kinds["remote"]["latency_us"], "p50")?,
        pager_us: guest.number("/faults/remote/latency_us/p50")?,
        late_us: [
            number(&timers["late_us"], "p50")?,
            number(&timers["late_us"], "p99")?,
        ],
        idle_percent: f64::from(ticks) / TICKS_PER_SECOND / seconds * 100.0,
        pages: [
            guest.number("/nodes/1/pages_fetched")?,
            guest.number("/nodes/1/pages_written_back")?,
        ],
    })
}

fn number(value: &Value, key: &str) -> anyhow::Result<f64> {
    let number = value[key].as_f64();
    number.with_context(|| format!("no {key} in {value}"))
}
