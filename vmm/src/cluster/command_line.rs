//! The command lines of processes to start: the VM, nodes, and nodes on other hosts through ssh.

use std::ffi::OsString;
use std::path::Path;
use std::time::Duration;

use toml::{Table, Value};

use super::Node;
use crate::config::RunSettings;
use crate::config::file::{ConfigFileError, to_table};

/// Interval at which ssh checks that the other host responds.
const ALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// Timeout of ssh's connection attempt.
const CONNECT_TIME_MAX: Duration = Duration::from_secs(10);

/// Returns the command line for these flags. A key without a value is a switch.
#[must_use]
pub(super) fn arguments(flags: &Table) -> Vec<String> {
    let mut arguments = Vec::new();
    for (key, value) in flags {
        let mut say = |value: &Value| match value {
            Value::Boolean(true) => arguments.push(format!("--{key}")),
            Value::Boolean(false) => {}
            Value::String(text) => arguments.push(format!("--{key}={text}")),
            other => arguments.push(format!("--{key}={other}")),
        };
        match value {
            Value::Array(values) => values.iter().for_each(say),
            value => say(value),
        }
    }
    arguments
}

/// Returns the arguments of `ssi-hv` for a VM.
///
/// # Errors
///
/// Fails if a path in it is not UTF-8.
pub fn vm_arguments(vm: &RunSettings) -> Result<Vec<String>, ConfigFileError> {
    let mut words = vec!["run".to_owned()];
    words.extend(arguments(&to_table(vm)?));
    Ok(words)
}

/// Returns the arguments of `ssi-hv` for a node that ends with the process that started it.
///
/// # Errors
///
/// Fails if a path in it is not UTF-8.
pub fn node_arguments(node: &Node) -> Result<Vec<String>, ConfigFileError> {
    let flags = arguments(&to_table(&node.config)?);
    let mut words = vec!["node".to_owned(), "--end-with-stdin".into()];
    words.extend(flags);
    Ok(words)
}

/// Returns the program and the arguments that start a node on the host `destination`.
///
/// ssh stays connected as long as the node can stay: it survives outages shorter than a lease, and
/// closes the connection after longer ones.
///
/// # Errors
///
/// Fails if a path in the node's configuration is not UTF-8.
pub fn by_ssh(
    node: &Node,
    destination: &str,
    more: &[&str],
) -> Result<(OsString, Vec<String>), ConfigFileError> {
    let place = &node.place;
    let program = place.ssh_program.as_deref().unwrap_or(Path::new("ssh"));
    let interval = ALIVE_INTERVAL.as_secs();
    let missed = u64::from(node.config.lease_seconds).div_ceil(interval);
    // ssh uses the first value of an option, so the user's options precede ours.
    let mut words = place.ssh_options.clone();
    words.extend(
        [
            "-T",
            // A prompt would appear on the terminal of the VM.
            "-oBatchMode=yes",
            // A separate connection, which ends with it.
            "-oControlPath=none",
            &format!("-oConnectTimeout={}", CONNECT_TIME_MAX.as_secs()),
            &format!("-oServerAliveInterval={interval}"),
            &format!("-oServerAliveCountMax={missed}"),
            "--",
            destination,
        ]
        .map(str::to_owned),
    );
    let remote = place.program.as_deref().unwrap_or("ssi-hv");
    let mut command = vec![remote.to_owned()];
    command.extend(node_arguments(node)?);
    command.extend(more.iter().map(|&flag| flag.to_owned()));
    let quoted = shlex::try_join(command.iter().map(String::as_str));
    let quoted = quoted.map_err(|error| ConfigFileError::Unprintable {
        message: error.to_string(),
    })?;
    // `exec` replaces the shell, so that it does not stay between ssh and the node.
    words.push(format!("exec {quoted}"));
    Ok((program.into(), words))
}

/// Returns the host of `[user@]host`.
pub(super) fn host_of(destination: &str) -> &str {
    destination
        .rsplit_once('@')
        .map_or(destination, |(_, host)| host)
}

/// Rejects a destination that ssh could interpret differently.
pub(super) fn check_destination(destination: &str) -> Result<(), String> {
    let host = host_of(destination);
    let plain = |c: char| !c.is_whitespace() && !c.is_control();
    if host.is_empty() || destination.starts_with('-') || !destination.chars().all(plain) {
        return Err(format!(
            "`{destination}` is no host for ssh; write ssh = \"USER@HOST\" or ssh = \"HOST\""
        ));
    }
    Ok(())
}
