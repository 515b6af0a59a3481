//! Settings that are one of a few words.

use memory_fabric::fabric::{Compression, OnLostMemory, TransportKind};
use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

use crate::machine::Irqchip;

/// A value that flags and files name by a word.
pub trait Choice: Copy + PartialEq + 'static {
    /// Each value, its word, and what it means.
    const ALL: &'static [(Self, &'static str, &'static str)];

    /// The value of a word.
    #[must_use]
    fn named(word: &str) -> Option<Self> {
        let mut all = Self::ALL.iter();
        let found = all.find(|(_, name, _)| *name == word);
        found.map(|(value, ..)| *value)
    }

    /// The word of this value.
    #[must_use]
    fn word(self) -> &'static str {
        let mut all = Self::ALL.iter();
        let found = all.find(|(value, ..)| *value == self);
        found.map_or("", |(_, word, _)| *word)
    }
}

/// Writes the word of a value.
pub(super) fn serialize<T: Choice, S: Serializer>(
    value: &T,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(value.word())
}

/// Reads a word; an unknown one is refused with those that are known, as serde does for an enum.
pub(super) fn deserialize<'de, T: Choice, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    let word = String::deserialize(deserializer)?;
    T::named(&word).ok_or_else(|| {
        let known: Vec<String> = T::ALL
            .iter()
            .map(|(_, word, _)| format!("`{word}`"))
            .collect();
        let expected = match &known[..] {
            [first, second] => format!("{first} or {second}"),
            all => format!("one of {}", all.join(", ")),
        };
        D::Error::custom(format!("unknown variant `{word}`, expected {expected}"))
    })
}

/// A word that may be absent.
pub(super) mod optional {
    use super::*;

    pub fn serialize<T: Choice, S: Serializer>(
        value: &Option<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match value {
            Some(value) => super::serialize(value, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub fn deserialize<'de, T: Choice, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<T>, D::Error> {
        super::deserialize(deserializer).map(Some)
    }
}

/// Declares a choice.
macro_rules! choices {
    ($($(#[$meta:meta])* $name:ident { $($value:ident $word:literal $help:literal,)* })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name {$(
            #[doc = $help]
            $value,
        )*}

        impl $crate::config::Choice for $name {
            const ALL: &'static [(Self, &'static str, &'static str)] =
                &[$((Self::$value, $word, $help),)*];
        }
    )*};
}

pub(crate) use choices;

choices! {
    /// What the guest sees of where its memory is.
    Numa {
        Flat "flat" "One NUMA node; remote memory is cached locally",
        Expose "expose" "Each node of the cluster is a NUMA node of the guest",
    }
    /// Which pages back memory with its home here.
    HugePages {
        Auto "auto" "Huge pages, where the kernel provides them",
        Off "off" "Pages of 4 KiB only",
    }
    /// Whether a device or feature is enabled.
    Switch {
        On "on" "Enabled",
        Off "off" "Disabled",
    }
    /// What a reboot of the guest does.
    OnReboot {
        Exit "exit" "The run ends, with its own exit code",
        Restart "restart" "The guest is booted again",
    }
    /// Where on donors memory is.
    Placement {
        Static "static" "Where it was at the start, or a command moved it",
        Heat "heat" "Hot memory moves to fast donors, cold memory makes room",
    }
    /// Whether vCPUs move between nodes without a command.
    VcpuPolicy {
        Static "static" "They stay where they are",
        Follow "follow" "They move to the node that has most of the pages that they wait for",
    }
    /// Whether pages are fetched before they are touched.
    Prefetching {
        Auto "auto" "When the guest's faults follow a pattern",
        Off "off" "Never",
    }
}

/// Implementation of the guest's interrupt controllers.
impl Choice for Irqchip {
    const ALL: &'static [(Self, &'static str, &'static str)] = &[
        (Self::Kernel, "kernel", "In the kernel (KVM)"),
        (
            Self::User,
            "user",
            "In this process: KVM then makes no asynchronous page faults",
        ),
    ];
}

/// How pages travel.
impl Choice for TransportKind {
    const ALL: &'static [(Self, &'static str, &'static str)] = &[
        (
            Self::Auto,
            "auto",
            "The best that both ends support, as measured",
        ),
        (Self::Tcp, "tcp", "TCP"),
        (
            Self::Loopback,
            "loopback",
            "A donor inside this process, for tests",
        ),
        (
            Self::Rdma,
            "rdma",
            "RDMA verbs in both directions; fails without RDMA",
        ),
        (
            Self::Hybrid,
            "hybrid",
            "RDMA verbs for pages that a vCPU waits for, TCP for all others",
        ),
        (Self::Udp, "udp", "QUIC over UDP, encrypted"),
    ];
}

/// The consequence of memory that is lost with a donor.
impl Choice for OnLostMemory {
    const ALL: &'static [(Self, &'static str, &'static str)] = &[
        (Self::End, "end", "The VM ends, with exit code 5"),
        (
            Self::Poison,
            "poison",
            "The VM continues, and the guest gets a machine check when it uses a lost page",
        ),
    ];
}

/// Whether pages are compressed on the network.
impl Choice for Compression {
    const ALL: &'static [(Self, &'static str, &'static str)] = &[
        (
            Self::Auto,
            "auto",
            "On each connection while measurements show a gain",
        ),
        (Self::On, "on", "Always"),
        (Self::Off, "off", "Never"),
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_has_a_word_of_its_own() {
        fn check<T: Choice + std::fmt::Debug>() {
            for (value, word, help) in T::ALL {
                assert_eq!(T::named(word), Some(*value));
                assert_eq!(value.word(), *word);
                assert!(!help.is_empty());
            }
            assert_eq!(T::named(""), None);
        }
        check::<TransportKind>();
        check::<Compression>();
        check::<OnLostMemory>();
        check::<Numa>();
        check::<HugePages>();
        check::<Irqchip>();
        check::<Switch>();
        check::<OnReboot>();
        check::<Prefetching>();
        check::<VcpuPolicy>();
    }
}
