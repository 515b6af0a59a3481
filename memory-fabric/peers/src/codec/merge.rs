//! Messages about merged tables.

use fabric_coherence::merge::MergeMessage;

use super::fields::{Reader, Writer};
use super::{DecodeError, Kind};

pub(super) fn encode_merge(message: &MergeMessage, to: &mut Writer) {
    match *message {
        MergeMessage::Copy { page, level } => to.page(page).byte(level),
        MergeMessage::Change { page, entries } | MergeMessage::Recalled { page, entries } => {
            to.page(page).entries(entries)
        }
        MergeMessage::Changed {
            page,
            entries,
            origin,
        } => to.page(page).entries(entries).member(origin),
        MergeMessage::Applied { page }
        | MergeMessage::Settled { page }
        | MergeMessage::Recall { page }
        | MergeMessage::Demoted { page } => to.page(page),
    };
}

pub(super) fn decode_merge(kind: Kind, from: &mut Reader<'_>) -> Result<MergeMessage, DecodeError> {
    let page = from.page()?;
    Ok(match kind {
        Kind::MergeCopy => MergeMessage::Copy {
            page,
            level: from.level()?,
        },
        Kind::MergeChange => MergeMessage::Change {
            page,
            entries: from.entries(),
        },
        Kind::MergeChanged => MergeMessage::Changed {
            page,
            entries: from.entries(),
            origin: from.member()?,
        },
        Kind::MergeApplied => MergeMessage::Applied { page },
        Kind::MergeSettled => MergeMessage::Settled { page },
        Kind::MergeRecall => MergeMessage::Recall { page },
        Kind::MergeRecalled => MergeMessage::Recalled {
            page,
            entries: from.entries(),
        },
        _ => MergeMessage::Demoted { page },
    })
}
