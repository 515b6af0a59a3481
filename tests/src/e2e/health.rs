//! What the hosts of a testbed did not do while a scenario failed: answer, and carry packets.
//!
//! A lease, a lifeline or a grace time of some seconds also ends if the emulator pauses for so long,
//! without counting as hung. The error of a scenario alone does not show which of the two happened.

use std::time::Duration;

use crate::testbed::{Host, Silence, Testbed};

/// Deadline for the commands on a host.
const COMMAND_TIME_MAX: Duration = Duration::from_secs(20);
/// Retransmissions of TCP after a time without an answer, since the host has booted, and the last
/// warnings of its kernel that are not of its first 10 s.
const SEEN: &str = "awk '/^TcpExt/ { if (!n) { n = split($0, name) } else { split($0, value); \
    for (i in name) if (name[i] == \"TCPTimeouts\") print \"TCP timeouts \" value[i] } }' /proc/net/netstat; \
    dmesg -r | grep '^<[0-4]>\\[ *[0-9][0-9]' | tail -n 2";

/// Returns a line about all hosts for the error of a scenario.
pub(super) fn of_hosts(testbed: &Testbed) -> String {
    let hosts = testbed.hosts().iter().map(of_host);
    hosts.collect::<Vec<_>>().join("; ")
}

fn of_host(host: &Host) -> String {
    // Before the command, for which a busy host takes its time.
    let heartbeat = describe_heartbeat(host.number(), host.silence());
    let seen = match host.run(&["sh", "-c", SEEN], COMMAND_TIME_MAX) {
        Ok(output) => output.stdout + &output.stderr,
        Err(error) => error.to_string(),
    };
    describe(&heartbeat, &seen)
}

fn describe(heartbeat: &str, seen: &str) -> String {
    let lines = seen.lines().map(str::trim).filter(|line| !line.is_empty());
    let mut text = heartbeat.to_owned();
    for line in lines {
        text.push_str(", ");
        text.push_str(line);
    }
    text
}

/// Returns how long a host's agent has not answered.
pub(super) fn describe_heartbeat(host: usize, silence: Silence) -> String {
    format!(
        "host {host}: last heartbeat {:.1} s ago, longest silence {:.1} s",
        silence.now.as_secs_f64(),
        silence.longest.as_secs_f64()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_one_part_of_a_line() {
        let silence = Silence {
            now: Duration::from_millis(300),
            longest: Duration::from_millis(7_250),
        };
        let heartbeat = describe_heartbeat(2, silence);
        let text = describe(
            &heartbeat,
            "TCP timeouts 4\n\n<4>[ 9.1] clocksource: slow\n",
        );
        assert_eq!(
            text,
            "host 2: last heartbeat 0.3 s ago, longest silence 7.2 s, TCP timeouts 4, \
             <4>[ 9.1] clocksource: slow"
        );
        assert_eq!(describe(&heartbeat, ""), heartbeat);
    }
}
