//! Tests of reading the command line, without running anything.

use std::collections::BTreeSet;

use super::*;

fn usage_error(arguments: &str) -> String {
    let words = std::iter::once("ssi-hv").chain(arguments.split_whitespace());
    match parse(words) {
        Err(Refused {
            error: CliError::Usage(message),
            ..
        }) => message,
        other => panic!("{arguments}: {other:?}"),
    }
}

#[test]
fn the_definition_is_consistent() {
    <Cli as clap::CommandFactory>::command().debug_assert();
}

#[test]
fn every_wrong_command_line_gets_one_line() {
    for (arguments, expected) in [
        (
            "run --memry 1G",
            "unexpected argument '--memry' found; a similar argument exists: '--memory'; see `ssi-hv run --help`",
        ),
        (
            "run --memory 1X",
            "invalid value '1X' for '--memory <SIZE>': `1X` is not a size; write a size as 4096, 512M, 768MiB, 1.5G or 1T (powers of 1024); see `ssi-hv run --help`",
        ),
        (
            "run --disk a.img,rw",
            "invalid value 'a.img,rw' for '--disk <DISK>': `rw` is not an option of a disk; write path=FILE[,readonly][,raw], FILE without a comma, and then any of bytes-per-second=SIZE, operations-per-second=N, burst-bytes=SIZE, burst-operations=N; see `ssi-hv run --help`",
        ),
        (
            "node --memory 1G",
            "the following required arguments were not provided: --listen <ADDR:PORT>; see `ssi-hv node --help`",
        ),
        (
            "doctr",
            "unrecognized subcommand 'doctr'; a similar subcommand exists: 'doctor'; see `ssi-hv --help`",
        ),
        (
            "run --memory",
            "a value is required for '--memory <SIZE>' but none was supplied; see `ssi-hv run --help`",
        ),
    ] {
        assert_eq!(usage_error(arguments), expected);
    }
}

#[test]
fn what_is_planned_says_so_and_what_is_there_instead() {
    for (arguments, start) in [
        ("run --rebalance on", "run --rebalance is not there yet"),
        ("run --rebalance=on", "run --rebalance is not there yet"),
    ] {
        let message = usage_error(arguments);
        assert!(message.starts_with(start), "{arguments}: {message}");
        assert!(message.contains("; "), "{arguments}: {message}");
    }
}

#[test]
fn flags_and_the_file_have_the_same_defaults() {
    let Ok(Invocation {
        action: Action::Run(config),
        ..
    }) = parse(["ssi-hv", "run"])
    else {
        panic!("`run` without flags can be read");
    };
    assert_eq!(*config, RunSettings::default());
}

/// Returns all arguments of a command and of its subcommands.
fn arguments_of(command: &clap::Command) -> Vec<clap::Arg> {
    let below = command.get_subcommands().flat_map(arguments_of);
    command.get_arguments().cloned().chain(below).collect()
}

#[test]
fn help_names_every_value_of_an_argument_that_has_few() {
    let mut looked_at = 0;
    for argument in arguments_of(&generate::command()) {
        if !argument.is_hide_possible_values_set() || argument.is_hide_set() {
            continue;
        }
        let help = argument.get_help().map(ToString::to_string);
        let names = argument.get_value_names().unwrap_or_default();
        let shown = names.join(" ") + " " + &help.unwrap_or_default();
        let words: BTreeSet<&str> = shown
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '-')
            .collect();
        for value in argument.get_possible_values() {
            let value = value.get_name();
            assert!(words.contains(value), "{value} of {argument}: {shown}");
            looked_at += 1;
        }
    }
    assert!(looked_at > 30, "{looked_at}");
}

#[test]
fn a_verbose_version_says_more() {
    let action = |arguments: &str| {
        let words = std::iter::once("ssi-hv").chain(arguments.split_whitespace());
        parse(words).expect("a version").action
    };
    for arguments in ["--version -v", "-v --version", "-vV", "-Vv", "-V --verbose"] {
        assert!(matches!(action(arguments), Action::Version), "{arguments}");
    }
    for arguments in ["--version", "-V"] {
        assert!(matches!(action(arguments), Action::Print(_)), "{arguments}");
    }
}
