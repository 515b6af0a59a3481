//! Running other programs, with errors that say what to do.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::ImageError;

/// Runs a command and returns its standard output.
///
/// # Errors
/// Fails when the command is missing (the error names its `package`) or does not exit with status 0
/// (the error ends with `remedy`).
pub fn output(command: &mut Command, package: &str, remedy: &str) -> Result<Vec<u8>, ImageError> {
    // Messages are parsed and shown, so they must not depend on the user's language.
    command.env("LC_ALL", "C").stdin(Stdio::null());
    let done = command
        .output()
        .map_err(|e| start_error(command, package, e))?;
    check(command, done, remedy)
}

/// Runs a command with `input` on its standard input and returns its standard output.
///
/// # Errors
/// As [`output`].
pub fn filter(
    command: &mut Command,
    input: &[u8],
    package: &str,
    remedy: &str,
) -> Result<Vec<u8>, ImageError> {
    command
        .env("LC_ALL", "C")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|e| start_error(command, package, e))?;
    let mut stdin = child.stdin.take();
    let done = std::thread::scope(|scope| {
        scope.spawn(move || {
            if let Some(stdin) = stdin.as_mut() {
                // A filter that stops early explains that by its exit status.
                let _ = stdin.write_all(input);
            }
            drop(stdin);
        });
        child.wait_with_output()
    });
    let done = done.map_err(|e| start_error(command, package, e))?;
    check(command, done, remedy)
}

fn start_error(command: &Command, package: &str, source: std::io::Error) -> ImageError {
    let name = command.get_program().to_string_lossy().into_owned();
    if source.kind() == std::io::ErrorKind::NotFound {
        ImageError::CommandMissing {
            command: name,
            package: package.to_owned(),
        }
    } else {
        ImageError::io(Path::new(&name))(source)
    }
}

fn check(
    command: &Command,
    done: std::process::Output,
    remedy: &str,
) -> Result<Vec<u8>, ImageError> {
    if done.status.success() {
        return Ok(done.stdout);
    }
    let stderr = String::from_utf8_lossy(&done.stderr);
    let detail = stderr
        .lines()
        .rev()
        .find(|l| !l.trim().is_empty())
        .unwrap_or("no message");
    let mut text = command.get_program().to_string_lossy().into_owned();
    for arg in command.get_args() {
        text.push(' ');
        text.push_str(&arg.to_string_lossy());
    }
    Err(ImageError::CommandFailed {
        command: text,
        status: done.status.to_string(),
        detail: detail.trim().to_owned(),
        remedy: remedy.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_command_names_its_package() {
        let error =
            output(&mut Command::new("no-such-command-here"), "the-package", "").unwrap_err();
        assert!(
            error.to_string().contains("apt-get install the-package"),
            "{error}"
        );
    }

    #[test]
    fn a_failed_command_shows_its_last_line_and_the_remedy() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo first >&2; echo last >&2; exit 3"]);
        let text = output(&mut command, "dash", "try harder")
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("last") && text.contains('3') && text.ends_with("try harder"),
            "{text}"
        );
    }

    #[test]
    fn a_filter_gets_more_than_a_pipe_holds() {
        let input = vec![7_u8; 1 << 20];
        assert_eq!(
            filter(&mut Command::new("cat"), &input, "coreutils", "").unwrap(),
            input
        );
    }
}
