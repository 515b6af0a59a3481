//! The kernel's command line.

use crate::error::MachineError;

/// The default command line of a stock kernel: a console on the serial port, and a restart right
/// after a panic, which ends the run with [`Outcome::Reboot`] unless the kernel has a driver that
/// reports panics. The kernel restarts through the ACPI reset register by its own default.
pub const DEFAULT_CMDLINE: &str = "console=ttyS0 panic=-1";

/// Returns [`DEFAULT_CMDLINE`] with `extra` appended. The last of contradicting parameters takes
/// effect, so `extra` can override each default.
pub fn command_line(extra: &str) -> String {
    match extra.trim() {
        "" => DEFAULT_CMDLINE.to_owned(),
        extra => format!("{DEFAULT_CMDLINE} {extra}"),
    }
}

/// Highest rate, in kHz, for which [`node_parameters`] gives `lpj=`: beyond it, x86 Linux with 1,000
/// ticks per second would cut the product of a delay to 32 bits (Linux,
/// arch/x86/lib/delay.c, `__const_udelay`), and wait too short.
pub const TSC_KHZ_FOR_LPJ_MAX: u32 = (u32::MAX / 1000) * TICKS_PER_SECOND / 250;

/// Ticks per second of the kernel that `lpj=` assumes: of the usual values (100, 250, 300, 1,000)
/// the one of Debian and Ubuntu. A kernel with more ticks waits longer than it wants to.
const TICKS_PER_SECOND: u32 = 250;

/// Returns the default parameters of a kernel whose vCPUs are on several hosts, without those that
/// `given` has, each followed by a space. `tsc_khz` is the rate of all its time stamp counters in
/// kHz, if it is known. The first `here` of its `cpus` vCPUs are on the host with the devices.
///
/// Such a kernel would measure delays and counters against each other on vCPUs that wait for pages
/// meanwhile, which takes minutes and finds faults where there are none. And it would have a vCPU
/// that has nothing to do look for work of others, and take interrupts of devices, from another host.
#[must_use]
pub fn node_parameters(given: &str, tsc_khz: Option<u32>, here: u32, cpus: u32) -> String {
    let mut defaults: Vec<String> = vec!["tsc=reliable".into()];
    if let Some(khz) = tsc_khz.filter(|khz| *khz > 0) {
        defaults.push(format!("tsc_early_khz={khz}"));
        if khz <= TSC_KHZ_FOR_LPJ_MAX {
            // The loop of a delay counts the time stamp counter.
            let per_tick = u64::from(khz) * 1000 / u64::from(TICKS_PER_SECOND);
            defaults.push(format!("lpj={per_tick}"));
        }
    }
    let given: Vec<String> = names(given).collect();
    if (1..cpus).contains(&here) && !given.iter().any(|name| name == "isolcpus") {
        defaults.push(format!("nohz_full={}", range(here, cpus)));
        defaults.push(format!("irqaffinity={}", range(0, here)));
    }
    let is_new = |parameter: &String| !names(parameter).any(|name| given.contains(&name));
    let kept = defaults.into_iter().filter(is_new);
    kept.map(|parameter| parameter + " ").collect()
}

/// CPUs from `first` to before `end` as the kernel's lists have them.
fn range(first: u32, end: u32) -> String {
    match end - first {
        1 => first.to_string(),
        _ => format!("{first}-{}", end - 1),
    }
}

/// The parameter with which Linux keeps only movable pages, none of its own data, in the memory of
/// nodes that are said to be removable.
pub const MOVABLE_NODE: &str = "movable_node";

/// Returns [`MOVABLE_NODE`], followed by a space, unless `given` has it.
#[must_use]
pub fn movable_parameter(given: &str) -> String {
    if names(given).any(|name| name == MOVABLE_NODE) {
        return String::new();
    }
    format!("{MOVABLE_NODE} ")
}

/// The names of the parameters up to `--`, after which the kernel takes none for itself. A name may
/// be written with `-` for `_`, and the whole parameter may be quoted (Linux, kernel/params.c and
/// lib/cmdline.c).
fn names(parameters: &str) -> impl Iterator<Item = String> {
    let mut quoted = false;
    let is_separator = move |character: char| {
        quoted ^= character == '"';
        character == ' ' && !quoted
    };
    parameters
        .split(is_separator)
        .take_while(|word| *word != "--")
        .filter(|word| !word.is_empty())
        .map(|word| {
            let name = word.trim_start_matches('"').split('=').next();
            name.unwrap_or_default()
                .trim_end_matches('"')
                .replace('-', "_")
        })
}

/// Returns whether a command line may contain this byte: printable ASCII.
#[must_use]
pub const fn is_of_cmdline(byte: u8) -> bool {
    matches!(byte, b' '..=b'~')
}

/// Checks `cmdline` against the limit of the kernel in bytes, and its characters.
pub(crate) fn check_cmdline(cmdline: &str, limit: u64) -> Result<(), MachineError> {
    let bytes = u64::try_from(cmdline.len()).unwrap_or(u64::MAX);
    if bytes > limit {
        return Err(MachineError::CmdlineTooLong { bytes, limit });
    }
    match cmdline
        .bytes()
        .enumerate()
        .find(|(_, byte)| !is_of_cmdline(*byte))
    {
        Some((position, byte)) => Err(MachineError::CmdlineByte { byte, position }),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_on_several_hosts_are_told_the_rate_of_their_counters() {
        let node_parameters = |given, khz| super::node_parameters(given, khz, 1, 1);
        let all = "tsc=reliable tsc_early_khz=2999998 lpj=11999992 ";
        assert_eq!(node_parameters("", Some(2_999_998)), all);
        assert_eq!(
            node_parameters("", None),
            "tsc=reliable ",
            "no rate is known"
        );
        assert_eq!(node_parameters("", Some(0)), node_parameters("", None));
        // The kernel with the most ticks per second multiplies `lpj` by 250 in 32 bits.
        let most = node_parameters("", Some(TSC_KHZ_FOR_LPJ_MAX));
        let lpj: u64 = most.trim().rsplit_once("lpj=").unwrap().1.parse().unwrap();
        assert!(lpj * 250 <= u64::from(u32::MAX), "{most}");
        assert!(lpj * 250 > u64::from(u32::MAX) - 1_000_000, "{most}");
        let beyond = node_parameters("", Some(TSC_KHZ_FOR_LPJ_MAX + 1));
        assert!(
            beyond.contains("tsc_early_khz=") && !beyond.contains("lpj"),
            "{beyond}"
        );
    }

    #[test]
    fn vcpus_elsewhere_have_no_work_of_others() {
        let added = |given, here, cpus| {
            node_parameters(given, None, here, cpus).replace("tsc=reliable ", "")
        };
        assert_eq!(added("", 1, 2), "nohz_full=1 irqaffinity=0 ");
        assert_eq!(added("", 2, 4), "nohz_full=2-3 irqaffinity=0-1 ");
        assert_eq!(added("nohz_full=3", 2, 4), "irqaffinity=0-1 ");
        assert_eq!(added("irqaffinity=0-3", 1, 4), "nohz_full=1-3 ");
        assert_eq!(added("isolcpus=domain,1", 1, 2), "");
        for (here, cpus) in [(2, 2), (0, 2), (0, 0)] {
            assert_eq!(added("", here, cpus), "", "{here} of {cpus}");
        }
    }

    #[test]
    fn nodes_are_movable_once() {
        assert_eq!(movable_parameter("quiet"), "movable_node ");
        assert_eq!(movable_parameter("quiet movable-node"), "");
        assert_eq!(movable_parameter("quiet -- movable_node"), "movable_node ");
    }

    #[test]
    fn parameters_that_are_given_are_not_added() {
        let khz = Some(1_000_000);
        let node_parameters = |given, khz| super::node_parameters(given, khz, 1, 2);
        for (given, gone) in [
            ("tsc=unstable", "tsc=reliable"),
            ("quiet lpj=1 root=/dev/vda", "lpj=4000000"),
            ("\"tsc=unstable\"", "tsc=reliable"),
            ("tsc-early-khz=5", "tsc_early_khz=1000000"),
            ("x=\"a b\" lpj=7", "lpj=4000000"),
        ] {
            let added = node_parameters(given, khz);
            let mut all = node_parameters("", khz);
            all = all.replace(&format!("{gone} "), "");
            assert_eq!(added, all, "{given}");
        }
        // Of another name, inside quotes, for init.
        for given in [
            "xlpj=1 lpjx=2 tsc_x",
            "ssi_exec=\"lpj=1 tsc=2\"",
            "-- lpj=1",
        ] {
            assert_eq!(
                node_parameters(given, khz),
                node_parameters("", khz),
                "{given}"
            );
        }
    }

    #[test]
    fn long_or_strange_command_lines_are_refused() {
        assert!(check_cmdline("console=ttyS0", 2047).is_ok());
        assert!(check_cmdline(&"a".repeat(2047), 2047).is_ok());
        let text = check_cmdline(&"a".repeat(2048), 2047)
            .unwrap_err()
            .to_string();
        assert!(text.contains("2048 bytes, 2047 is the limit"), "{text}");
        for strange in ["a\0b", "a\nb", "caf\u{e9}"] {
            let error = check_cmdline(strange, 2047).unwrap_err();
            assert!(matches!(error, MachineError::CmdlineByte { .. }));
        }
    }
}
