//! What each default parameter of the guest's kernel brings a guest that boots on two hosts.

use std::time::{Duration, Instant};

use anyhow::Context as _;

use super::{CLOUD, TWO_FROM_START, end, said};
use crate::e2e::guest::{Finished, INIT_REACHED, SHORT, exit};
use crate::e2e::status::{number, status};
use crate::e2e::{Context, Result, Verdict};
use crate::testbed::TestbedError;

/// Name of the guest.
const NAME: &str = "parameters";
/// A guest whose init does not run by then is ended.
const WITHIN: Duration = Duration::from_secs(400);

/// Guests that are compared. A parameter without a value takes the place of the default one of that
/// name, and the kernel measures for itself what it would have been told.
const COMPARED: [&str; 6] = ["", "tsc=", "tsc_early_khz=", "lpj=", "isolcpus=", ""];

/// What a kernel says when it finds a clock or counter wrong.
const FAULTS: [&str; 4] = ["unstable", "warp", "not consistent", "skipping"];

pub(super) fn compared(context: &Context<'_>) -> Result {
    for parameter in COMPARED {
        let said = boots(context, parameter).with_context(|| format!("with {parameter:?}"))?;
        let without = match parameter {
            "" => "all parameters".to_owned(),
            name => format!("without {}", name.trim_end_matches('=')),
        };
        context.note(format!("{without}: {said} (emulated)"));
    }
    Ok(Verdict::Pass)
}

/// Boots a guest, and says how long that takes, what its nodes received, and what its kernel found
/// wrong with its clocks.
fn boots(context: &Context<'_>, parameter: &str) -> anyhow::Result<String> {
    let nodes = TWO_FROM_START.nodes(context)?;
    let mut guest = TWO_FROM_START.guest(CLOUD, "sleep 1000");
    guest.cmdline.insert_str(0, &format!("{parameter} "));
    guest.more.extend(["--name", NAME]);
    let started = Instant::now();
    let process = guest.start(context)?;
    let init = match process.wait_for_line(INIT_REACHED, WITHIN) {
        Ok(_) => format!("init after {:.0} s", started.elapsed().as_secs_f64()),
        Err(TestbedError::Deadline { .. }) => format!("no init within {} s", WITHIN.as_secs()),
        Err(error) => return Err(error).with_context(|| said(&process, &nodes)),
    };
    let status = status(context.testbed.host(1), &[NAME]);
    let status = status.with_context(|| said(&process, &nodes))?;
    let [first, second] = [0, 1].map(|node| {
        let pages = format!("/vms/0/nodes/{node}/transfers/pages_received");
        number(&status, &pages)
    });
    process.kill(libc::SIGTERM)?;
    let guest = Finished::read(context, process.wait(SHORT)?)?;
    guest.expect_exit(exit::TERMINATED)?;
    end(context, nodes)?;
    Ok(format!(
        "{init}; {} and {} pages received; {:?}",
        first?,
        second?,
        faults(&guest.output.stdout)
    ))
}

/// The lines of a console that say that a clock is wrong.
fn faults(console: &str) -> Vec<&str> {
    let is_fault = |line: &&str| FAULTS.iter().any(|fault| line.contains(fault));
    console.lines().filter(is_fault).collect()
}

#[cfg(test)]
mod tests {
    use super::faults;

    #[test]
    fn wrong_clocks_are_found_on_the_console() {
        let wrong = "[ 1.0] tsc: Marking TSC unstable due to check_tsc_sync_source failed";
        let console = format!("[ 0.5] smp: x\r\n{wrong}\r\n[ 1.1] y\r\n");
        assert_eq!(faults(&console), [wrong]);
    }
}
