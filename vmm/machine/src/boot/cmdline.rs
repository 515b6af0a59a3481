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
